/* Floats on the caller's thread. A host may round differently there, flush subnormals (a library built with -ffast-math
 * makes its whole thread do so), trap exceptions, or write a comma for the decimal point. What we compute, compare and
 * print there depends on none of it. */
#ifndef NIB_FLOATS_H
#define NIB_FLOATS_H

#include <fenv.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>

struct nib_floats {
  fenv_t host;
  bool changed;
};

/* Whether the thread computes in the default environment. Saving and setting it costs 50 times as much as this look. */
static inline bool nib_floats_are_default(void) {
#if defined(__x86_64__) && defined(__GNUC__)
  unsigned short x87; /* whose rounding printf follows */
  __asm__ volatile("fnstcw %0" : "=m"(x87));
  return (__builtin_ia32_stmxcsr() & 0xFFC0) == 0x1F80 && (x87 & 0x0F3F) == 0x033F;
#else
  return false;
#endif
}

/* Between the two floats are as everywhere else. What is computed must come from memory or from NIB_OPAQUE values: the
 * compiler does not know that arithmetic must not leave this place. */
static inline void nib_floats_enter(struct nib_floats *floats) {
  floats->changed = !nib_floats_are_default();
  if (!floats->changed) return;
  fegetenv(&floats->host);
  fesetenv(FE_DFL_ENV);
}

static inline void nib_floats_leave(const struct nib_floats *floats) {
  if (floats->changed) fesetenv(&floats->host);
}

#define NIB_OPAQUE(variable) __asm__ volatile("" : "+m"(variable) : : "memory")

/* snprintf of one real, as it is in the "C" locale. */
static inline int nib_format_real(char *text, size_t size, const char *format, double real) {
  if (isnan(real)) return snprintf(text, size, "nan"); /* printf may show its sign */
  struct nib_floats floats;
  nib_floats_enter(&floats);
  int length = snprintf(text, size, format, real);
  nib_floats_leave(&floats);
  if (length <= 0 || (size_t)length >= size) return length;
  char *to = text;
  for (const char *from = text; *from; from++) { /* a decimal point has one byte or more */
    bool plain = (*from >= '0' && *from <= '9') || (*from >= 'a' && *from <= 'z') || *from == '-' || *from == '+';
    if (plain || to == text || to[-1] != '.') *to++ = plain ? *from : '.';
  }
  *to = 0;
  return (int)(to - text);
}

#endif
