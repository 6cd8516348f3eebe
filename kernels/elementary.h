/* sin, cos and log in float64, built from + - * / and comparisons alone, which IEEE rounds the same everywhere. A
 * libm's own functions differ between machines in the last bit; these give the same bits in C and CUDA. Errors stay
 * below 1.5 ulp. */
#ifndef NIB_ELEMENTARY_H
#define NIB_ELEMENTARY_H

#include "nvfp4.h"

/* sin and cos of r + tail, |r| <= pi/4 and tail a few ulp of r at most, turned by `quadrant` quarter circles. Taylor
 * series: the first term left out is below 2^-58 of the result. */
NIB_HD void nib_sincos_quadrant(double r, double tail, uint32_t quadrant, double *sine, double *cosine) {
  double z = r * r;
  double p = 1.0 / 355687428096000.0;
  p = p * z - 1.0 / 1307674368000.0;
  p = p * z + 1.0 / 6227020800.0;
  p = p * z - 1.0 / 39916800.0;
  p = p * z + 1.0 / 362880.0;
  p = p * z - 1.0 / 5040.0;
  p = p * z + 1.0 / 120.0;
  p = p * z - 1.0 / 6.0;
  double s = r + (r * z * p + tail * (1.0 - 0.5 * z));

  double q = -1.0 / 6402373705728000.0;
  q = q * z + 1.0 / 20922789888000.0;
  q = q * z - 1.0 / 87178291200.0;
  q = q * z + 1.0 / 479001600.0;
  q = q * z - 1.0 / 3628800.0;
  q = q * z + 1.0 / 40320.0;
  q = q * z - 1.0 / 720.0;
  q = q * z + 1.0 / 24.0;
  /* 1 - z/2 loses bits; they are known exactly and added back. */
  double half = 0.5 * z;
  double head = 1.0 - half;
  double c = head + (((1.0 - head) - half) + (z * z * q - r * tail));

  double s2 = quadrant & 1 ? c : s;
  double c2 = quadrant & 1 ? s : c;
  *sine = quadrant & 2 ? -s2 : s2;
  *cosine = (quadrant + 1) & 2 ? -c2 : c2;
}

/* a + b = sum + error, exactly. */
NIB_HD double nib_two_sum(double a, double b, double *error) {
  double sum = a + b;
  double b2 = sum - a;
  *error = (a - (sum - b2)) + (b - b2);
  return sum;
}

/* sin and cos of an angle in radians, |angle| < 2^31. Anything else (infinities, NaN) gives NaN rather than a wrong
 * value. */
NIB_HD void nib_sincos(double angle, double *sine, double *cosine) {
  if (!(angle > -2147483648.0 && angle < 2147483648.0)) {
    *sine = *cosine = (double)nib_f32_from_bits(NIB_F32_NAN);
    return;
  }
  /* k = angle / (pi/2) to the nearest integer: 1.5 * 2^52 has step 1, so that adding it rounds. */
  const double step1 = 6755399441055744.0;
  double k = (angle * 0x1.45f306dc9c883p-1 + step1) - step1;
  /* angle - k * pi/2, with pi/2 in three parts of 22 bits (each times k < 2^31 is exact) and the rest; what the
   * subtractions round off is kept. */
  double e2, e3, e4;
  double r = angle - k * 0x1.921fb0p+0;
  r = nib_two_sum(r, -(k * 0x1.5110b0p-22), &e2);
  r = nib_two_sum(r, -(k * 0x1.184698p-44), &e3);
  r = nib_two_sum(r, -(k * 0x1.3198a2e037073p-69), &e4);
  double tail;
  r = nib_two_sum(r, (e2 + e3) + e4, &tail);
  nib_sincos_quadrant(r, tail, (uint32_t)(int64_t)k & 3, sine, cosine);
}

/* sin and cos of a whole turn's fraction, 0 <= turn < 1: 2 pi * turn, without a reduction's error. */
NIB_HD void nib_sincos_turn(double turn, double *sine, double *cosine) {
  uint32_t quadrant = (uint32_t)(turn * 4.0 + 0.5);
  double rest = turn - quadrant * 0.25; /* exact, within 1/8 */
  nib_sincos_quadrant(rest * 0x1.921fb54442d18p+2, rest * 0x1.1a62633145c07p-52, quadrant, sine, cosine);
}

/* The natural logarithm of a positive, normal, finite x: x = m * 2^e with m near 1, log m = 2 atanh((m - 1) / (m + 1))
 * by its series. */
NIB_HD double nib_log(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  int32_t e = (int32_t)(bits >> 52) - 1023;
  bits = (bits & 0x000FFFFFFFFFFFFFu) | 0x3FF0000000000000u;
  double m;
  memcpy(&m, &bits, sizeof m);
  if (m > 0x1.6a09e667f3bcdp+0) {
    m *= 0.5;
    e += 1;
  }
  double f = m - 1.0;
  double s = f / (2.0 + f);
  double z = s * s;
  double p = 1.0 / 25.0;
  for (int n = 23; n >= 3; n -= 2) p = p * z + 1.0 / n;
  /* 2s = f - s*f, so that f carries the leading bits exactly. */
  double rest = s * (2.0 * z * p - f);
  return e * 0x1.62e42fefa2p-1 + (f + (rest + e * 0x1.9ef35793c7673p-41));
}

#endif
