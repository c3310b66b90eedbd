/* Panels of weights by group, of inputs that are floats, or were rounded to integers. */
#include "slices.h"

void panel_of_floats(const Linear *l, int64_t p, int m, const GroupInputs *x, float *c, int64_t ldc, Workspace *b) {
#ifdef DOT
  OF_KINDS(FLOATS)
#else
  OF_KINDS_AND_ALONE(FLOATS)
#endif
}

void panel_of_rounded(const Linear *l, int64_t p, int m, const GroupInputs *x, float *c, int64_t ldc, Workspace *b) {
  OF_KIND(ROUNDED, FOUR, ANY);
}
