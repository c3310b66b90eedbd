/* Products on tiles: registers of 16 rows by 64 bytes, which AMX multiplies.
 *
 * One instruction takes 16 inputs, 32 terms of their sums and 16 outputs. It sums the even terms and the odd ones in their
 * order, each from zero, and adds both to what the output had:  c + ((a0 b0 + a2 b2 + ...) + (a1 b1 + a3 b3 + ...)).  A row
 * gets the same bits whatever rows are beside it, and attention.c makes the same sums of a few rows without tiles. Numbers
 * too small for a normal float are zeros here; `begin_tiles` makes them zeros for a thread's other arithmetic, too.
 *
 * An instruction takes as long for one row as for 16. Four sums are under way at a time, those of two tiles of rows by two
 * of outputs, so that each tile that is loaded is multiplied twice and no product waits for the one before.
 */
#include "tiles.h"

#ifdef TILES

uint32_t begin_tiles(void) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } tiles = {.palette = 1};
  for (int i = 0; i < 8; i++) tiles.bytes[i] = 2 * DEPTH, tiles.rows[i] = SIDE;
  SETTLE_MEMORY();
  _tile_loadconfig(&tiles);
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  return before;
}

void end_tiles(uint32_t before) {
  _tile_release();
  _mm_setcsr(before);
}

INLINE void multiply_rows(int two, int64_t n, Inputs x, const char *w, float *c, int64_t ldc, int add, Next *next) {
  begin_sums(two, c, ldc, add);
  for (int64_t i = 0; i < n; i++, x.at += x.step, w += 2 * TILE) {
    if (next) ask_for_lines(next);
    add_terms(two, x, w);
  }
  end_sums(two, c, ldc);
}

void multiply_tiles(int64_t m, int64_t n, Inputs x, const char *w, float *c, int64_t ldc, int add, Next *next) {
  SETTLE_MEMORY();
  for (; m > 0; m -= 2 * SIDE, x.at += x.block, c += 2 * SIDE * ldc) {
    if (m > SIDE) multiply_rows(1, n, x, w, c, ldc, add, next);
    else multiply_rows(0, n, x, w, c, ldc, add, next);
  }
  SETTLE_MEMORY();
}

void pack_inputs(const float *x, int64_t ldx, int64_t m, int64_t from, int64_t to, int64_t k, uint16_t *out) {
  const Inputs packed = packed_inputs(out, m, k);
  const int64_t rows = block_rows(m);
  for (int64_t j = from; j < to; j++) {
    const float *in = x + j * ldx;
    char *at = (char *)out + j / rows * packed.block + j % rows * packed.row;
    for (int64_t c = 0; c < k; c += DEPTH, at += packed.step) {
      const int64_t n = k - c < DEPTH ? k - c : DEPTH;
      narrow(in + c, n, (uint16_t *)at);
      if (n < DEPTH) memset((uint16_t *)at + n, 0, sizeof(uint16_t) * (size_t)(DEPTH - n));
    }
  }
}
#endif
