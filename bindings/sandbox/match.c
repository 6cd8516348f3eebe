/* find, match, gmatch and gsub with Lua's patterns, as its manual defines them. The matcher counts its steps, so that a
 * pattern that backtracks for long ends at the deadline. */
#include <ctype.h>
#include <string.h>

#include "sandbox.h"

#define MOST_CAPTURES 32
#define MOST_DEPTH    200

enum { OPEN = -1, POSITION = -2 };

struct match {
  lua_State *L;
  const char *subject, *subject_end, *pattern_end;
  int depth, captures;
  struct {
    const char *start;
    ptrdiff_t length; /* or OPEN, POSITION */
  } capture[MOST_CAPTURES];
};

/* ---- Single characters ----------------------------------------------------------------------------------------- */

/* The end of the character, class or set at p. */
static const char *item_end(const struct match *m, const char *p) {
  if (*p == '%') {
    if (p + 1 >= m->pattern_end) luaL_error(m->L, "malformed pattern (ends with '%%')");
    return p + 2;
  }
  if (*p != '[') return p + 1;
  p++;
  if (p < m->pattern_end && *p == '^') p++;
  const char *first = p; /* a ']' here is a character of the set */
  while (p < m->pattern_end && (*p != ']' || p == first)) p += *p == '%' && p + 1 < m->pattern_end ? 2 : 1;
  nib_sandbox_steps(m->L, (size_t)(p - first) / 64);
  if (p >= m->pattern_end) luaL_error(m->L, "malformed pattern (missing ']')");
  return p + 1;
}

static bool is_in_class(int c, int class) {
  bool is;
  switch (tolower(class)) {
  case 'a': is = isalpha(c); break;
  case 'c': is = iscntrl(c); break;
  case 'd': is = isdigit(c); break;
  case 'g': is = isgraph(c); break;
  case 'l': is = islower(c); break;
  case 'p': is = ispunct(c); break;
  case 's': is = isspace(c); break;
  case 'u': is = isupper(c); break;
  case 'w': is = isalnum(c); break;
  case 'x': is = isxdigit(c); break;
  case 'z': is = c == 0; break; /* deprecated since 5.2, but still accepted */
  default: return class == c;
  }
  return isupper(class) ? !is : is;
}

/* Whether the character is in the set from '[' at p to ']' at last. */
static bool is_in_set(const struct match *m, int c, const char *p, const char *last) {
  nib_sandbox_steps(m->L, (size_t)(last - p) / 64);
  bool negated = p[1] == '^';
  for (p += negated ? 2 : 1; p < last; p++) {
    bool is;
    if (*p == '%') {
      p++;
      is = is_in_class(c, (unsigned char)*p);
    } else if (p[1] == '-' && p + 2 < last) {
      is = (unsigned char)p[0] <= c && c <= (unsigned char)p[2];
      p += 2;
    } else {
      is = (unsigned char)*p == c;
    }
    if (is) return !negated;
  }
  return negated;
}

/* Whether the character at s matches the item p..end. */
static bool is_one(const struct match *m, const char *s, const char *p, const char *end) {
  nib_sandbox_step(m->L);
  if (s >= m->subject_end) return false;
  int c = (unsigned char)*s;
  switch (*p) {
  case '.': return true;
  case '%': return is_in_class(c, (unsigned char)p[1]);
  case '[': return is_in_set(m, c, p, end - 1);
  default: return (unsigned char)*p == c;
  }
}

/* ---- Patterns -------------------------------------------------------------------------------------------------- */

static const char *match_here(struct match *m, const char *s, const char *p);

/* %bxy: the end of the balanced text that begins at s, or NULL. */
static const char *match_balance(const struct match *m, const char *s, const char *p) {
  if (p + 1 >= m->pattern_end) luaL_error(m->L, "malformed pattern (missing arguments to '%%b')");
  if (s >= m->subject_end || *s != *p) return NULL;
  int level = 1;
  while (++s < m->subject_end) {
    nib_sandbox_step(m->L);
    if (*s == p[1]) {
      if (--level == 0) return s + 1;
    } else if (*s == *p) {
      level++;
    }
  }
  return NULL;
}

static const char *match_frontier(struct match *m, const char *s, const char *p) {
  if (p >= m->pattern_end || *p != '[') luaL_error(m->L, "missing '[' after '%%f' in pattern");
  const char *end = item_end(m, p);
  int before = s == m->subject ? 0 : (unsigned char)s[-1], here = s < m->subject_end ? (unsigned char)*s : 0;
  if (is_in_set(m, before, p, end - 1) || !is_in_set(m, here, p, end - 1)) return NULL;
  return match_here(m, s, end);
}

static const char *match_again(const struct match *m, const char *s, int digit) {
  int i = digit - '1';
  if (i < 0 || i >= m->captures || m->capture[i].length == OPEN) luaL_error(m->L, "invalid capture index %%%d", i + 1);
  if (m->capture[i].length == POSITION) return NULL; /* a position capture has no text to match */
  size_t length = (size_t)m->capture[i].length;
  for (size_t k = 0; k < length; k += 256) nib_sandbox_step(m->L);
  if ((size_t)(m->subject_end - s) < length || memcmp(m->capture[i].start, s, length) != 0) return NULL;
  return s + length;
}

static const char *open_capture(struct match *m, const char *s, const char *p) {
  bool is_position = p + 1 < m->pattern_end && p[1] == ')';
  if (m->captures >= MOST_CAPTURES) luaL_error(m->L, "too many captures");
  m->capture[m->captures].start = s;
  m->capture[m->captures].length = is_position ? POSITION : OPEN;
  m->captures++;
  const char *result = match_here(m, s, p + (is_position ? 2 : 1));
  if (!result) m->captures--;
  return result;
}

static const char *close_capture(struct match *m, const char *s, const char *p) {
  int i = m->captures - 1;
  while (i >= 0 && m->capture[i].length != OPEN) i--;
  if (i < 0) luaL_error(m->L, "invalid pattern capture");
  m->capture[i].length = s - m->capture[i].start;
  const char *result = match_here(m, s, p + 1);
  if (!result) m->capture[i].length = OPEN;
  return result;
}

/* Matches the item p..end as often as possible, then less often down to `least`, until the rest matches. */
static const char *match_most(struct match *m, const char *s, const char *p, const char *end, ptrdiff_t least) {
  ptrdiff_t count = 0;
  while (is_one(m, s + count, p, end)) count++;
  for (; count >= least; count--) {
    const char *result = match_here(m, s + count, end + 1);
    if (result) return result;
  }
  return NULL;
}

static const char *match_fewest(struct match *m, const char *s, const char *p, const char *end) {
  for (;; s++) {
    const char *result = match_here(m, s, end + 1);
    if (result) return result;
    if (!is_one(m, s, p, end)) return NULL;
  }
}

/* The end of the match of the pattern from p on at s, or NULL. */
static const char *match_rest(struct match *m, const char *s, const char *p) {
  while (p < m->pattern_end) {
    if (*p == '(') return open_capture(m, s, p);
    if (*p == ')') return close_capture(m, s, p);
    if (*p == '$' && p + 1 == m->pattern_end) return s == m->subject_end ? s : NULL;
    if (*p == '%' && p + 1 < m->pattern_end) {
      if (p[1] == 'b') {
        s = match_balance(m, s, p + 2);
        if (!s) return NULL;
        p += 4;
        continue;
      }
      if (p[1] == 'f') return match_frontier(m, s, p + 2);
      if (isdigit((unsigned char)p[1])) {
        s = match_again(m, s, p[1]);
        if (!s) return NULL;
        p += 2;
        continue;
      }
    }
    const char *end = item_end(m, p);
    char repeat = end < m->pattern_end ? *end : 0;
    if (repeat == '*') return match_most(m, s, p, end, 0);
    if (repeat == '+') return match_most(m, s, p, end, 1);
    if (repeat == '-') return match_fewest(m, s, p, end);
    bool is = is_one(m, s, p, end);
    if (repeat == '?') {
      const char *result = is ? match_here(m, s + 1, end + 1) : NULL;
      if (result) return result;
      p = end + 1;
      continue;
    }
    if (!is) return NULL;
    s++;
    p = end;
  }
  return s;
}

static const char *match_here(struct match *m, const char *s, const char *p) {
  nib_sandbox_step(m->L);
  if (++m->depth > MOST_DEPTH) luaL_error(m->L, "pattern too complex");
  const char *result = match_rest(m, s, p);
  m->depth--;
  return result;
}

/* ---- Captures -------------------------------------------------------------------------------------------------- */

/* Pushes capture i of the match start..end, or the whole match if the pattern has no captures. */
static void push_capture(const struct match *m, int i, const char *start, const char *end) {
  if (i >= m->captures) {
    if (i > 0) luaL_error(m->L, "invalid capture index %%%d", i + 1);
    lua_pushlstring(m->L, start, (size_t)(end - start));
  } else if (m->capture[i].length == POSITION) {
    lua_pushinteger(m->L, m->capture[i].start - m->subject + 1);
  } else if (m->capture[i].length == OPEN) {
    luaL_error(m->L, "unfinished capture");
  } else {
    lua_pushlstring(m->L, m->capture[i].start, (size_t)m->capture[i].length);
  }
}

/* Pushes all captures and returns their number; without captures, the whole match unless start is NULL. */
static int push_captures(const struct match *m, const char *start, const char *end) {
  int count = m->captures == 0 && start ? 1 : m->captures;
  luaL_checkstack(m->L, count, "too many captures");
  for (int i = 0; i < count; i++) push_capture(m, i, start, end);
  return count;
}

/* A matcher for the strings at two indices. */
static struct match prepare(lua_State *L, int subject_index, int pattern_index, const char **pattern) {
  size_t length;
  struct match m = { .L = L };
  m.subject = lua_tolstring(L, subject_index, &length);
  m.subject_end = m.subject + length;
  *pattern = lua_tolstring(L, pattern_index, &length);
  m.pattern_end = *pattern + length;
  return m;
}

static const char *try_at(struct match *m, const char *s, const char *pattern) {
  m->captures = m->depth = 0;
  return match_here(m, s, pattern);
}

/* ---- find and match -------------------------------------------------------------------------------------------- */

/* The position at which a search begins, from 0. It may be past the subject's end. */
static size_t start_position(lua_Integer position, size_t length) {
  if (position > 0) return (size_t)position - 1;
  if (position == 0 || position < -(lua_Integer)length) return 0;
  return length - (size_t)-position;
}

static const char *find_plain(lua_State *L, const char *s, const char *end, const char *text, size_t length) {
  if (length == 0) return s;
  for (; (size_t)(end - s) >= length; s++) {
    nib_sandbox_step(L);
    const char *next = memchr(s, *text, (size_t)(end - s) - length + 1);
    if (!next) return NULL;
    nib_sandbox_steps(L, (size_t)(next - s) / 1024);
    s = next;
    size_t same = 1; /* no memcmp: a long comparison must count its steps */
    while (same < length && s[same] == text[same])
      if ((++same & 63) == 0) nib_sandbox_step(L);
    if (same == length) return s;
  }
  return NULL;
}

static int search(lua_State *L, bool is_find) {
  const char *pattern;
  luaL_checkstring(L, 1);
  luaL_checkstring(L, 2);
  struct match m = prepare(L, 1, 2, &pattern);
  size_t length = (size_t)(m.subject_end - m.subject), size = (size_t)(m.pattern_end - pattern);
  size_t start = start_position(luaL_optinteger(L, 3, 1), length);
  if (start > length) {
    lua_pushnil(L);
    return 1;
  }
  bool special = false;
  for (size_t i = 0; i < size && !special; i++) {
    if ((i & 15) == 0) nib_sandbox_step(L);
    special = pattern[i] && strchr("^$*+?.([%-", pattern[i]) != NULL;
  }
  if (is_find && (lua_toboolean(L, 4) || !special)) {
    const char *found = find_plain(L, m.subject + start, m.subject_end, pattern, size);
    if (!found) {
      lua_pushnil(L);
      return 1;
    }
    lua_pushinteger(L, found - m.subject + 1);
    lua_pushinteger(L, found - m.subject + (ptrdiff_t)size);
    return 2;
  }
  bool anchored = *pattern == '^';
  for (const char *s = m.subject + start; s <= m.subject_end; s++) {
    const char *end = try_at(&m, s, pattern + anchored);
    if (end && is_find) {
      lua_pushinteger(L, s - m.subject + 1);
      lua_pushinteger(L, end - m.subject);
      return push_captures(&m, NULL, NULL) + 2;
    }
    if (end) return push_captures(&m, s, end);
    if (anchored) break;
  }
  lua_pushnil(L);
  return 1;
}

static int string_find(lua_State *L) { return search(L, true); }
static int string_match(lua_State *L) { return search(L, false); }

/* ---- gmatch ---------------------------------------------------------------------------------------------------- */

/* Upvalues: subject, pattern, position to continue at, end of the last match (-1: none). */
static int next_match(lua_State *L) {
  const char *pattern;
  struct match m = prepare(L, lua_upvalueindex(1), lua_upvalueindex(2), &pattern);
  const char *last = m.subject + lua_tointeger(L, lua_upvalueindex(4));
  for (const char *s = m.subject + lua_tointeger(L, lua_upvalueindex(3)); s <= m.subject_end; s++) {
    const char *end = try_at(&m, s, pattern);
    if (!end || end == last) continue;
    lua_pushinteger(L, end - m.subject);
    lua_pushvalue(L, -1);
    lua_replace(L, lua_upvalueindex(3));
    lua_replace(L, lua_upvalueindex(4));
    return push_captures(&m, s, end);
  }
  return 0;
}

static int string_gmatch(lua_State *L) {
  size_t length;
  luaL_checklstring(L, 1, &length);
  luaL_checkstring(L, 2);
  size_t start = start_position(luaL_optinteger(L, 3, 1), length);
  lua_settop(L, 2);
  lua_pushinteger(L, (lua_Integer)(start > length ? length + 1 : start));
  lua_pushinteger(L, -1);
  lua_pushcclosure(L, next_match, 4);
  return 1;
}

/* ---- gsub ------------------------------------------------------------------------------------------------------ */

static void add_text(struct match *m, luaL_Buffer *out, const char *start, const char *end) {
  size_t length;
  lua_State *L = m->L;
  const char *text = lua_tolstring(L, 3, &length), *text_end = text + length;
  while (text < text_end) {
    const char *escape = memchr(text, '%', (size_t)(text_end - text));
    luaL_addlstring(out, text, (size_t)((escape ? escape : text_end) - text));
    if (!escape) return;
    char c = escape + 1 < text_end ? escape[1] : 0;
    nib_sandbox_step(L);
    if (c == '%') {
      luaL_addchar(out, '%');
    } else if (c == '0') {
      luaL_addlstring(out, start, (size_t)(end - start));
    } else if (isdigit((unsigned char)c)) {
      push_capture(m, c - '1', start, end);
      luaL_tolstring(L, -1, NULL); /* a position is a number */
      lua_remove(L, -2);
      luaL_addvalue(out);
    } else {
      luaL_error(L, "invalid use of '%%' in replacement string");
    }
    text = escape + 2;
  }
}

static void add_replacement(struct match *m, luaL_Buffer *out, const char *start, const char *end) {
  lua_State *L = m->L;
  int type = lua_type(L, 3);
  if (type == LUA_TSTRING || type == LUA_TNUMBER) {
    add_text(m, out, start, end);
    return;
  }
  if (type == LUA_TTABLE) {
    push_capture(m, 0, start, end);
    lua_gettable(L, 3);
  } else {
    lua_pushvalue(L, 3);
    int count = push_captures(m, start, end);
    lua_call(L, count, 1);
  }
  if (!lua_toboolean(L, -1)) {
    lua_pop(L, 1);
    luaL_addlstring(out, start, (size_t)(end - start));
  } else if (lua_isstring(L, -1)) {
    luaL_addvalue(out);
  } else {
    luaL_error(L, "invalid replacement value (a %s)", luaL_typename(L, -1));
  }
}

static int string_gsub(lua_State *L) {
  const char *pattern;
  luaL_checkstring(L, 1);
  luaL_checkstring(L, 2);
  int type = lua_type(L, 3);
  if (type != LUA_TNUMBER && type != LUA_TSTRING && type != LUA_TTABLE && type != LUA_TFUNCTION)
    return luaL_error(L, "bad argument #3 to 'gsub' (string/function/table expected, got %s)", luaL_typename(L, 3));
  if (type == LUA_TNUMBER) lua_tostring(L, 3); /* converts it in place */
  struct match m = prepare(L, 1, 2, &pattern);
  lua_Integer most = luaL_optinteger(L, 4, m.subject_end - m.subject + 1), count = 0;
  bool anchored = *pattern == '^';
  const char *s = m.subject, *last = NULL;
  luaL_Buffer out;
  luaL_buffinit(L, &out);
  while (count < most) {
    const char *end = try_at(&m, s, pattern + anchored);
    if (end && end != last) {
      count++;
      add_replacement(&m, &out, s, end);
      s = last = end;
    } else if (s < m.subject_end) {
      luaL_addchar(&out, *s++);
    } else {
      break;
    }
    if (anchored) break;
  }
  luaL_addlstring(&out, s, (size_t)(m.subject_end - s));
  luaL_pushresult(&out);
  lua_pushinteger(L, count);
  return 2;
}

const luaL_Reg nib_sandbox_patterns[] = {
  { "find", string_find }, { "match", string_match }, { "gmatch", string_gmatch }, { "gsub", string_gsub },
  { NULL, NULL },
};
