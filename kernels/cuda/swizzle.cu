/* V scales between linear and 4-token-interleaved order. */
#include "kernel.cuh"

/* Four bytes of an interleaved row are one block's scales of four tokens. A thread moves WIDTH of those between
 * WIDTH consecutive bytes of each of the four linear rows and 4 * WIDTH bytes of the interleaved one. `blocks` is a
 * multiple of 4 * WIDTH. */
template <int WIDTH> __device__ __forceinline__ void swizzle(const struct nib_swizzle_params &p) {
  uint32_t quarter = (uint32_t)(p.blocks / 4), steps = quarter / WIDTH;
  int64_t groups = p.page_size / 4;
  const struct nib_paged &linear = p.inverse ? p.destination : p.source,
                         &interleaved = p.inverse ? p.source : p.destination;
  int64_t per_page = groups * p.heads * p.blocks / WIDTH; /* threads' pieces: [groups, heads, 4, steps] */
  for (int64_t page = blockIdx.x; page < p.num_pages; page += gridDim.x)
    for (int64_t at = (int64_t)blockIdx.y * blockDim.x + threadIdx.x; at < per_page;
         at += (int64_t)gridDim.y * blockDim.x) {
      int64_t rest = nib_divide(at, steps);
      uint32_t step = (uint32_t)(at - rest * steps), row = (uint32_t)(rest & 3);
      rest >>= 2;
      int64_t group = nib_divide(rest, p.heads), head = rest - group * p.heads;
      uint8_t *four = nib_paged_row(&linear, page, group * 4, head) + row * quarter + WIDTH * step;
      uint8_t *one = nib_paged_row(&interleaved, page, group * 4 + row, head) + 4 * WIDTH * step;
      uint32_t a[4] = { 0, 0, 0, 0 }, b[4];
      if (!p.inverse) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
          const uint8_t *from = four + t * linear.token_stride;
          a[t] = WIDTH == 4 ? *(const uint32_t *)from : WIDTH == 2 ? *(const uint16_t *)from : *from;
        }
      } else if (WIDTH == 4) {
        uint4 all = *(const uint4 *)one;
        a[0] = all.x, a[1] = all.y, a[2] = all.z, a[3] = all.w;
      } else if (WIDTH == 2) {
        uint2 all = *(const uint2 *)one;
        a[0] = all.x, a[1] = all.y;
      } else {
        a[0] = one[0] | (uint32_t)one[1] << 8 | (uint32_t)one[2] << 16 | (uint32_t)one[3] << 24;
      }
      /* A 4x4 transposition of bytes, which is its own inverse. */
      uint32_t low01 = __byte_perm(a[0], a[1], 0x5140), high01 = __byte_perm(a[0], a[1], 0x7362);
      uint32_t low23 = __byte_perm(a[2], a[3], 0x5140), high23 = __byte_perm(a[2], a[3], 0x7362);
      b[0] = __byte_perm(low01, low23, 0x5410), b[1] = __byte_perm(low01, low23, 0x7632);
      b[2] = __byte_perm(high01, high23, 0x5410), b[3] = __byte_perm(high01, high23, 0x7632);
      if (p.inverse) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
          uint8_t *to = four + t * linear.token_stride;
          if (WIDTH == 4) *(uint32_t *)to = b[t];
          else if (WIDTH == 2) *(uint16_t *)to = (uint16_t)b[t];
          else *to = (uint8_t)b[t];
        }
      } else if (WIDTH == 4) {
        *(uint4 *)one = make_uint4(b[0], b[1], b[2], b[3]);
      } else if (WIDTH == 2) {
        *(uint2 *)one = make_uint2(b[0], b[1]);
      } else {
#pragma unroll
        for (int t = 0; t < 4; t++) one[t] = (uint8_t)(b[0] >> (8 * t));
      }
    }
}

/* 4-byte accesses of linear rows, 16-byte accesses of interleaved ones. */
NIB_ENTRY(swizzle_32, 256, 4, nib_swizzle_params) { swizzle<4>(p); }

/* 2-byte accesses of linear rows, 8-byte accesses of interleaved ones. */
NIB_ENTRY(swizzle_16, 256, 4, nib_swizzle_params) { swizzle<2>(p); }

NIB_ENTRY(swizzle_narrow, 256, 4, nib_swizzle_params) { swizzle<1>(p); }
