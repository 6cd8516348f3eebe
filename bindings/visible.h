/* Makes untrusted text safe for a terminal: names, paths, messages, output of scripts. show.visible does so in Lua. */
#ifndef NIB_VISIBLE_H
#define NIB_VISIBLE_H

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* The number of bytes of the UTF-8 character at `text`, and its code; 0 if it is invalid. */
static inline size_t nib_utf8_character(const unsigned char *text, size_t length, unsigned long *code) {
  static const unsigned long least[] = { 0, 0, 0x80, 0x800, 0x10000 };
  size_t bytes = text[0] < 0x80   ? 1
                 : text[0] < 0xC2 ? 0
                 : text[0] < 0xE0 ? 2
                 : text[0] < 0xF0 ? 3
                 : text[0] < 0xF5 ? 4
                                  : 0;
  if (bytes == 0 || bytes > length) return 0;
  *code = bytes == 1 ? text[0] : text[0] & (0x7Fu >> bytes);
  for (size_t i = 1; i < bytes; i++) {
    if ((text[i] & 0xC0) != 0x80) return 0;
    *code = *code << 6 | (text[i] & 0x3F);
  }
  return *code < least[bytes] || *code > 0x10FFFF || (*code >= 0xD800 && *code < 0xE000) ? 0 : bytes;
}

/* The number of bytes of an escape sequence that sets colours (ESC [ 1 ; 31 m); 0 if there is none. */
static inline size_t nib_colour(const char *text, size_t length) {
  if (length < 3 || text[0] != '\033' || text[1] != '[') return 0;
  size_t end = 2 + strspn(text + 2, "0123456789;");
  return end < length && text[end] == 'm' ? end + 1 : 0;
}

/* Writes text. Control characters, marks that change the direction of text, and bytes that are not UTF-8 become \x1B or
 * \u{202E}. `lines` keeps line ends and tabs, `colours` keeps colours. The text must end with a zero byte. */
static inline void nib_put_visible(FILE *to, const char *text, size_t length, bool lines, bool colours) {
  for (size_t i = 0; i < length;) {
    unsigned long code = 0;
    size_t bytes = nib_utf8_character((const unsigned char *)text + i, length - i, &code);
    size_t colour = colours ? nib_colour(text + i, length - i) : 0;
    if (colour > 0 || (lines && (text[i] == '\n' || text[i] == '\t'))) {
      bytes = colour > 0 ? colour : 1;
      fwrite(text + i, 1, bytes, to);
    } else if (bytes == 0 || code < 0x20 || code == 0x7F) {
      bytes = 1;
      fprintf(to, "\\x%02X", (unsigned)(unsigned char)text[i]);
    } else if ((code >= 0x80 && code < 0xA0) || code == 0x200E || code == 0x200F ||
               (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069)) {
      fprintf(to, "\\u{%lX}", code);
    } else {
      fwrite(text + i, 1, bytes, to);
    }
    i += bytes;
  }
}

#endif
