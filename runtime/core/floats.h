/* Floating-point work on the caller's thread. A host may have set another rounding mode there, flush subnormals (any
 * library built with -ffast-math does), trap exceptions, or use a locale with a decimal comma. These functions make our
 * results independent of that. */
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

/* Whether the thread has the default environment. This check is 50 times as fast as saving and setting it. */
static inline bool nib_floats_are_default(void) {
#if defined(__x86_64__) && defined(__GNUC__)
  unsigned short x87; /* printf uses its rounding mode */
  __asm__ volatile("fnstcw %0" : "=m"(x87));
  return (__builtin_ia32_stmxcsr() & 0xFFC0) == 0x1F80 && (x87 & 0x0F3F) == 0x033F;
#else
  return false;
#endif
}

/* Between enter and leave the environment is the default one. Operands must come from memory or through NIB_OPAQUE,
 * since the compiler may otherwise move arithmetic out of this region. */
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

/* snprintf of one real as in the "C" locale. */
static inline int nib_format_real(char *text, size_t size, const char *format, double real) {
  if (isnan(real)) return snprintf(text, size, "nan"); /* printf may print its sign */
  struct nib_floats floats;
  nib_floats_enter(&floats);
  int length = snprintf(text, size, format, real);
  nib_floats_leave(&floats);
  if (length <= 0 || (size_t)length >= size) return length;
  char *to = text;
  for (const char *from = text; *from; from++) { /* a locale's decimal point can have several bytes */
    bool plain = (*from >= '0' && *from <= '9') || (*from >= 'a' && *from <= 'z') || *from == '-' || *from == '+';
    if (plain || to == text || to[-1] != '.') *to++ = plain ? *from : '.';
  }
  *to = 0;
  return (int)(to - text);
}

#endif
