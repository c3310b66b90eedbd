/* What one position stores under its key, and reads with its query, at PANEL dimensions of a head's values: what is stored
 * there of a head with 128 dimensions of keys takes 16 KB, and stays in the first cache for a whole prompt.
 *
 *     S *= kept;  S += k (x) share * (v - k.S);  o = q.S              the gated delta rule (`models/parts/recurrent/delta_rule.py`)
 *     S *= kept;  S += k (x) share * v;  o = q.S + skip * v           the scan of Mamba-2 (`scan.py` there)
 *
 * Prompts and single positions are computed alike. So a sequence gets the same bits wherever it is cut: chunks of positions
 * as products of matrices would sum in another order.
 */
#include "rules.h"

typedef struct {
  vp part[PARTS];
} Line;

INLINE void add_line(Line *sums, float x, const float *line) {
  for (int p = 0; p < PARTS; p++)
    sums->part[p] = add_times_part(sums->part[p], splat_part(x), part_at(line + p * WIDTH));
}

/* S = kept * S + key (x) change; returns q.S */
INLINE Line store_and_read(float *stored, int64_t key_dim, const Change *c, const Line *change) {
  Line out = {0};
  for (int64_t i = 0; i < key_dim; i++)
    for (int p = 0; p < PARTS; p++) {
      float *at = stored + i * PANEL + p * WIDTH;
      const vp now = add_times_part(c->kept * part_at(at), splat_part(c->key[i]), change->part[p]);
      set_part(at, now);
      out.part[p] = add_times_part(out.part[p], splat_part(c->query[i]), now);
    }
  return out;
}

void apply_delta_rule(float *stored, int64_t key_dim, const Change *c, float *values) {
  Line even = {0}, odd = {0}, change; /* two sums: one would wait for itself */
  int64_t i = 0;
  for (; i + 1 < key_dim; i += 2) {
    add_line(&even, c->key[i], stored + i * PANEL);
    add_line(&odd, c->key[i + 1], stored + (i + 1) * PANEL);
  }
  if (i < key_dim) add_line(&even, c->key[i], stored + i * PANEL);
  for (int p = 0; p < PARTS; p++)
    change.part[p] = c->share * (part_at(values + p * WIDTH) - c->kept * (even.part[p] + odd.part[p]));
  const Line out = store_and_read(stored, key_dim, c, &change);
  for (int p = 0; p < PARTS; p++) set_part(values + p * WIDTH, out.part[p]);
}

void apply_scan(float *stored, int64_t key_dim, const Change *c, float *values) {
  Line change;
  for (int p = 0; p < PARTS; p++) change.part[p] = c->share * part_at(values + p * WIDTH);
  const Line out = store_and_read(stored, key_dim, c, &change);
  for (int p = 0; p < PARTS; p++) {
    const vp given = part_at(values + p * WIDTH);
    set_part(values + p * WIDTH, add_times_part(out.part[p], splat_part(c->skip), given));
  }
}
