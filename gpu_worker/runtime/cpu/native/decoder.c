/* A decoder's forward on a CPU, from token ids to logits in one call.
 *
 * If the caches hold the weights, each thread computes its own share of the sequences from the first layer to the last
 * (`share`): no thread waits, and the output of one map is in the thread's own cache for the next map. For large weights,
 * few sequences or one long prompt, all threads work together: they divide the outputs of each map, so that each weight
 * is read once, and meet after the map.
 *
 * Activations are float32, or packed in bfloat16 (`can_pack`). Weights and the KV cache are read as they are stored, and
 * widened in registers. If the processor multiplies bfloat16 (DOT), activations are rounded to bfloat16 instead. The
 * result for a position depends on that position alone: every sum runs over its terms in one fixed order, whatever the
 * batch, the number of threads or the blocking. So a sequence gets the same bits alone and among others, in one prefill
 * and in chunks. matrix.c and attention.c say how.
 *
 * Nothing reads what the last layer makes of a position without logits, except its key and value. So behind these that
 * layer computes the outputs alone.
 *
 * Vectors are those of the compiler (vector_size), not of one instruction set.
 */
#include <omp.h>

#include "adapters.h"
#include "attention.h"
#include "library.h"
#include "tiles.h"

/* With a bias a LayerNorm, else an RMSNorm. */
typedef struct {
  const float *weight, *bias;
} Norm;

/* Without a post_norm, attention and MLP stand side by side: both begin from the input norm. */
typedef struct {
  Norm input_norm, post_norm;
  const float *q_norm, *k_norm;
  Linear qkv, out, gate_up, down; /* gate_up: of `inner` outputs it has no gate, and its activation is a GELU */
  int64_t window;
} Layer;

typedef struct {
  int32_t n_layers, hidden, inner;
  float eps;
  const float *rotary; /* [positions, head_dim]: cos | sin; or null */
  Norm norm;
  Layer *layers;
  Linear head;
  Cache cache;
  const Library *library; /* or null */
} Model;

typedef struct {
  int64_t t, from;          /* positions of the step, or of the share of it that begins at `from` */
  const int64_t *token_ids; /* [t], or null: hidden holds their embeddings */
  const int64_t *positions; /* [t] */
  const int64_t *rotary;    /* [t] the positions by which queries and keys are rotated */
  const int64_t *limits;    /* [t] the end of the positions that each sees, or null: all up to itself */
  const int64_t *rows;      /* [t] page-table rows */
  float *hidden;            /* [t, hidden]; in the end [o, hidden], the outputs' alone, before the last norm */
  float *normed;            /* [t, hidden], and like `mixed` and `acted` maybe packed */
  float *qkv;               /* [t, q + 2 kv] */
  float *mixed;             /* [t, q] */
  float *gates;             /* [t, outputs of gate_up]; unused where gate_up is gated */
  float *acted;             /* [t, inner] */
  const Delta *const *adapters; /* [t] deltas, [layers][MAPS], or null; null where the step has none */
  float *reduced;           /* [t, most outputs of an A], where there are adapters */
  int64_t reduced_stride;
  uint16_t *halves;         /* [t, most terms of a sum], for the library */
  int64_t o;                /* positions whose results are wanted */
  const int64_t *outputs;   /* [o] those, ascending */
  float *logits;            /* [o, vocab], out; or null */
  int32_t n_threads;
  char *scratch;            /* [threads] of `scratch_stride` bytes; see petiole_scratch */
  int64_t scratch_stride;
  void (*progress)(void);   /* called every REPORT_S seconds of a step, between two maps; or null */
} Step;

#ifndef REPORT_S
#define REPORT_S 1.0
#endif
#define LEAST 8              /* positions of a share: fewer do not make up for reading all weights */
#define CACHED (64ll << 20) /* bytes of weights that every thread may read for itself */
#define UNEQUAL 8            /* the largest share may exceed the mean by 1 / UNEQUAL of it */
#define READ_COST 32         /* a float of the KV cache that is read costs about as much as so many multiply-adds */

/* What is computed of a step: all positions, or its outputs. */
typedef struct {
  Step step; /* `t` and `o`: so many positions */
  const int64_t *inputs; /* [t] those, ascending */
  const Unit *units;
  int64_t n_units;
  const Run *runs;
  int64_t n_runs;
  int packed; /* whether normed, mixed and acted are packed in bfloat16 */
} Plan;

/* The order of an adapter's deltas in a layer. */
enum { QKV = 0, OUT = 1, GATE_UP = 2, DOWN = 3, MAPS = 4 };

static void rms_norm(const float *x, const float *weight, float *y, int n, float eps) {
  vf squares = {0};
  int full = n / LANES * LANES;
  for (int c = 0; c < full; c += LANES) squares += load(x + c) * load(x + c);
  float total = sum(squares);
  for (int c = full; c < n; c++) total += x[c] * x[c];
  float by = 1.0f / sqrtf(total / n + eps);
  for (int c = 0; c < full; c += LANES) store(y + c, load(weight + c) * (load(x + c) * by));
  for (int c = full; c < n; c++) y[c] = weight[c] * (x[c] * by);
}

static void layer_norm(const float *x, const Norm *norm, float *y, int n, float eps) {
  vf sums = {0}, squares = {0};
  int full = n / LANES * LANES;
  for (int c = 0; c < full; c += LANES) sums += load(x + c);
  float total = sum(sums);
  for (int c = full; c < n; c++) total += x[c];
  const float mean = total / n;
  for (int c = 0; c < full; c += LANES) squares += (load(x + c) - mean) * (load(x + c) - mean);
  total = sum(squares);
  for (int c = full; c < n; c++) total += (x[c] - mean) * (x[c] - mean);
  const float by = 1.0f / sqrtf(total / n + eps);
  for (int c = 0; c < full; c += LANES)
    store(y + c, load(norm->weight + c) * ((load(x + c) - mean) * by) + load(norm->bias + c));
  for (int c = full; c < n; c++) y[c] = norm->weight[c] * ((x[c] - mean) * by) + norm->bias[c];
}

static void normalise(const float *x, const Norm *norm, float *y, int n, float eps) {
  if (norm->bias) layer_norm(x, norm, y, n, eps);
  else rms_norm(x, norm->weight, y, n, eps);
}

static void rotate(float *x, const float *table, int d) {
  int half = d / 2;
  for (int c = 0; c < half; c++) {
    float low = x[c], high = x[c + half];
    x[c] = low * table[c] - high * table[c + half];
    x[c + half] = high * table[c] + low * table[c + half];
  }
}

/* x (1 + tanh(s)) / 2 with s = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-2s) */
INLINE vf gelu1(vf x) { return x * sigmoid(x * (x * x * 0.0713548163f + 1.5957691216f)); }

static void gelu(const float *x, float *y, int n) {
  int full = n / LANES * LANES;
  for (int c = 0; c < full; c += LANES) store(y + c, gelu1(load(x + c)));
  for (int c = full; c < n; c++) y[c] = gelu1(splat(x[c]))[0];
}

static void keep(int kind, const char *pool, int64_t at, const float *x, int n) {
  if (kind == F32) memcpy((float *)pool + at, x, 4 * n);
  else if (kind == E4M3) narrow_e4m3(x, n, (uint8_t *)pool + at);
  else narrow(x, n, (uint16_t *)pool + at);
}

static void rotate_and_keep(const Model *m, const Layer *l, int64_t i, const Step *s) {
  const Cache *cache = &m->cache;
  const int d = cache->head_dim, wide = (cache->heads + 2 * cache->kv_heads) * d;
  const int64_t token = (int64_t)cache->kv_heads * d;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++) {
    float *q = s->qkv + t * wide, *k = q + cache->heads * d, *v = k + token;
    const int64_t at = (i * cache->n_slots + slot_of(cache, s->rows[t], s->positions[t])) * token;
    for (int h = 0; h < cache->heads + cache->kv_heads; h++) {
      const float *weight = h < cache->heads ? l->q_norm : l->k_norm;
      if (weight) rms_norm(q + h * d, weight, q + h * d, d, m->eps);
      if (m->rotary) rotate(q + h * d, m->rotary + s->rotary[t] * d, d);
    }
    keep(cache->kv_kind, cache->keys, at, k, (int)token);
    keep(cache->kv_kind, cache->values, at, v, (int)token);
  }
}

static void attention(const Model *m, int64_t layer, const Plan *p, Desk *d) {
  const Step *s = &p->step;
  const Cache *cache = &m->cache;
  const int64_t window = m->layers[layer].window, q = (int64_t)cache->heads * cache->head_dim;
  const int64_t wide = q + 2 * (int64_t)cache->kv_heads * cache->head_dim;
  const int64_t group = q / cache->kv_heads;
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = p->n_units - 1; i >= 0; i--) { /* from the end: the longest first */
    const Unit *u = p->units + i, *next = i < omp_get_num_threads() ? u : u - omp_get_num_threads();
    attend(cache, layer, window, u, next, s->qkv + u->span->t * wide + u->head * group, wide,
           (Activations){s->mixed, p->packed}, d);
  }
}

/* row: a thread's own scratch */
static void norms(const Model *m, const Plan *p, const Norm *norm, float *row) {
  const Step *s = &p->step;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++) {
    normalise(s->hidden + t * m->hidden, norm, p->packed ? row : s->normed + t * m->hidden, m->hidden, m->eps);
    if (p->packed) pack_row(row, m->hidden, t, s->normed);
  }
}

/* A step's linear maps, in their order: MAPS for each layer, then the head. */
typedef struct {
  const Linear *l;
  int64_t rows;
  Activations x, y;
  How how;
} Map;

/* Whether the map of gates and ups multiplies them, too. An adapter changes them before. */
static int is_gated(const Model *m, const Layer *l, const Step *s) {
  return l->gate_up.n > m->inner && m->inner % PANEL == 0 && !l->gate_up.library && !s->adapters;
}

static Map map_at(const Model *m, const Plan *p, int64_t at) {
  const Step *s = &p->step;
  const Activations normed = {s->normed, p->packed}, mixed = {s->mixed, p->packed}, acted = {s->acted, p->packed};
  const Activations qkv = {s->qkv, 0}, hidden = {s->hidden, 0}, gates = {s->gates, 0}, logits = {s->logits, 0};
  if (at == (int64_t)m->n_layers * MAPS) return (Map){&m->head, s->t, normed, logits, SET};
  const Layer *l = m->layers + at / MAPS;
  switch (at % MAPS) {
    case QKV: return (Map){&l->qkv, s->t, normed, qkv, SET};
    case OUT: return (Map){&l->out, s->t, mixed, hidden, ADD};
    case GATE_UP:
      if (is_gated(m, l, s)) return (Map){&l->gate_up, s->t, normed, acted, GATED};
      return (Map){&l->gate_up, s->t, normed, gates, SET};
    default: return (Map){&l->down, s->t, acted, hidden, ADD};
  }
}

/* What the adapters add to a map. */
static void deltas(const Map *map, int64_t at, const Plan *p, Bench *b) {
  const Step *s = &p->step;
  if (p->n_runs)
    add_deltas(p->runs, p->n_runs, at, map->x.at, map->l->k, map->y.at, map->l->n, s->reduced, s->reduced_stride, b);
}

/* The most terms of a sum, those of an adapter's B among them. */
static int64_t widest(const Model *m, const Step *s) {
  const int64_t of[] = {m->hidden, m->inner, (int64_t)m->cache.heads * m->cache.head_dim, s->reduced_stride};
  int64_t k = 0;
  for (int i = 0; i < 4; i++) k = of[i] > k ? of[i] : k;
  return k;
}

/* Scratch that all threads read. */
typedef struct {
  int64_t *inputs;
  Span *spans;
  Unit *units;
  Run *runs;
} Lists;

/* A thread's scratch. The lists are those of the first thread. */
typedef struct {
  Lists lists[2];
  Bench bench;
  Desk desk;
} Room;

static Room new_room(const Model *m, const Step *s, Scratch *scratch) {
  Room r;
  for (int i = 0; i < 2; i++) {
    r.lists[i].inputs = take(scratch, s->t * (int64_t)sizeof(int64_t));
    r.lists[i].spans = take(scratch, s->t * (int64_t)sizeof(Span));
    r.lists[i].units = take(scratch, s->t * m->cache.kv_heads * (int64_t)sizeof(Unit));
    r.lists[i].runs = take(scratch, s->t * (int64_t)sizeof(Run));
  }
  r.bench = new_bench(s->t, widest(m, s), scratch);
  r.desk = new_desk(&m->cache, smaller(s->t, span_length(&m->cache)), scratch);
  return r;
}

/* The bytes of scratch that each thread of a step needs. */
int64_t petiole_scratch(const Model *m, const Step *s) {
  Scratch none = {NULL, 0};
  new_room(m, s, &none);
  return none.used;
}

/* Up to the keys and values of the last layer all positions are computed, behind those the outputs. */
typedef struct {
  Plan all, last;
} Plans;

/* Whether what the maps of a step take can be packed: they all multiply on tiles, and packed it is no larger, which takes
 * SIDE rows. */
static int can_pack(const Model *m, const Step *s) {
#ifdef TILES
  if (s->t < SIDE || s->adapters || m->library || m->hidden % DEPTH || m->inner % DEPTH || m->cache.head_dim % DEPTH)
    return 0;
  for (int64_t i = 0; i < m->n_layers; i++) {
    const Layer *l = m->layers + i;
    if (!HALF_INPUTS(l->qkv.kind) || !HALF_INPUTS(l->out.kind)) return 0;
    if (!HALF_INPUTS(l->gate_up.kind) || !HALF_INPUTS(l->down.kind)) return 0;
  }
  return !s->logits || HALF_INPUTS(m->head.kind);
#else
  return (void)m, (void)s, 0;
#endif
}

/* A plan of the first `n` inputs of a list. */
static Plan new_plan(const Model *m, const Step *s, int64_t n, int n_threads, const Lists *l) {
  Plan p = {.step = *s, .inputs = l->inputs, .units = l->units, .runs = l->runs, .packed = can_pack(m, s)};
  p.step.t = n;
  const int64_t n_spans = find_spans(&m->cache, n, l->inputs, s->rows, s->positions, s->limits, l->spans);
  p.n_units = find_units(&m->cache, l->spans, n_spans, n_threads, l->units);
  p.n_runs = s->adapters ? find_runs(n, l->inputs, s->adapters, l->runs) : 0;
  return p;
}

static Plans new_plans(const Model *m, const Step *s, int n_threads, const Lists lists[2]) {
  for (int64_t i = 0; i < s->t; i++) lists[0].inputs[i] = i;
  for (int64_t i = 0; i < s->o; i++) lists[1].inputs[i] = s->outputs[i] - s->from;
  const Plan all = new_plan(m, s, s->t, n_threads, lists);
  return (Plans){all, s->o == s->t ? all : new_plan(m, s, s->o, n_threads, lists + 1)};
}

static const Plan *plan_at(const Model *m, const Plans *plans, int64_t at) {
  return at <= (m->n_layers - 1) * (int64_t)MAPS + QKV ? &plans->all : &plans->last;
}

/* x [all positions, width] -> those of a plan */
static void pick_rows(const Plan *p, Activations x, int64_t width) {
  for (int64_t i = 0; i < p->step.t; i++) {
    float *rows = x.at;
    if (!x.packed) memmove(rows + i * width, rows + p->inputs[i] * width, sizeof(float) * (size_t)width);
    for (int64_t c = 0; x.packed && c < width; c += DEPTH)
      memmove(packed_at(x.at, width, i, c), packed_at(x.at, width, p->inputs[i], c), sizeof(uint16_t) * DEPTH);
  }
}

/* What comes before a map: its inputs. */
static void prepare(const Model *m, const Plans *plans, int64_t at, Room *own) {
  float *row = own->bench.inputs;
  const int64_t i = at / MAPS;
  const Layer *l = m->layers + i;
  const Plan *p = plan_at(m, plans, at);
  const Step *s = &p->step;
  if (i == m->n_layers) norms(m, p, &m->norm, row);
  else if (at % MAPS == QKV) norms(m, p, &l->input_norm, row);
  else if (at % MAPS == GATE_UP) {
    if (l->post_norm.weight) norms(m, p, &l->post_norm, row);
  } else if (at % MAPS == OUT) {
    rotate_and_keep(m, l, i, &plans->all.step);
    attention(m, i, p, &own->desk);
    if (s->t == plans->all.step.t) return;
#pragma omp single
    {
      pick_rows(p, (Activations){s->hidden, 0}, m->hidden);
      pick_rows(p, (Activations){s->normed, p->packed}, m->hidden);
      pick_rows(p, (Activations){s->mixed, p->packed}, (int64_t)m->cache.heads * m->cache.head_dim);
    }
  } else if (!is_gated(m, l, s)) {
    const int64_t gates = l->gate_up.n, gated = gates > m->inner;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < s->t; t++) {
      const float *in = s->gates + t * gates;
      float *to = p->packed ? row : s->acted + t * m->inner;
      if (gated) silu_mul(in, in + m->inner, to, m->inner);
      else gelu(in, to, m->inner);
      if (p->packed) pack_row(row, m->inner, t, s->acted);
    }
  }
}

/* Says that a long step makes progress. */
static void report(const Step *s, double *last) {
  const double now = omp_get_wtime();
  if (!s->progress || now - *last < REPORT_S) return;
  *last = now;
  s->progress();
}

/* What has been done of a map. */
enum { NOTHING_YET = 0, PREPARED = 1, MULTIPLIED = 2 };

/* A step or a share of one, on `n_threads` threads. The threads run one region up to each map that is the library's,
 * which has threads of its own. Returns how many maps the library has failed at: they are computed here. */
static int compute(const Model *m, const Step *s, int n_threads, const Library *library) {
  const Room first = new_room(m, s, &(Scratch){s->scratch, 0});
  const Plans plans = new_plans(m, s, n_threads, first.lists);
  const int64_t head = (int64_t)m->n_layers * MAPS, n_maps = head + (s->logits != NULL);
  int stage = NOTHING_YET, failures = 0; /* of the map `from` */
  double reported = omp_get_wtime();
  for (int64_t from = 0, end; from < n_maps; from = end) {
    for (end = stage ? from + 1 : from; end < n_maps; end++) {
      const Map map = map_at(m, plan_at(m, &plans, end), end);
      if (library && of_library(map.l, map.rows)) break;
    }
#pragma omp parallel num_threads(n_threads)
    {
      const uint32_t before = begin_tiles();
      Room own = new_room(m, s, &(Scratch){s->scratch + omp_get_thread_num() * s->scratch_stride, 0});
      own.bench.packed = first.bench.packed;
      if (!from && !stage && s->token_ids) embed(&m->head, s->t, s->token_ids, s->hidden);
      for (int64_t at = from; at < smaller(end + 1, n_maps); at++) {
        const Plan *plan = plan_at(m, &plans, at);
        const Map map = map_at(m, plan, at);
        const int reached = at == from ? stage : NOTHING_YET;
        if (reached < PREPARED) prepare(m, &plans, at, &own);
        if (at == end) break;
        if (reached < MULTIPLIED) linear(map.l, map.rows, map.x, map.y, map.how, &own.bench);
        if (at < head) deltas(&map, at, plan, &own.bench);
        if (omp_get_thread_num() == 0) report(s, &reported);
      }
      end_tiles(before);
    }
    if (end == n_maps) break;
    const Map map = map_at(m, plan_at(m, &plans, end), end);
    const int made = library_linear(library, map.l, map.rows, map.x.at, map.y.at, map.how == ADD, s->halves, n_threads);
    stage = made ? MULTIPLIED : PREPARED;
    failures += !made;
  }
  return failures;
}

/* Positions [from, to), for thread i. */
static Step part_of(const Model *m, const Step *s, int64_t from, int64_t to, int i) {
  const int64_t q = (int64_t)m->cache.heads * m->cache.head_dim;
  const int64_t wide = q + 2 * (int64_t)m->cache.kv_heads * m->cache.head_dim;
  int64_t first = 0, end;
  while (first < s->o && s->outputs[first] < from) first++;
  for (end = first; end < s->o && s->outputs[end] < to;) end++;
  return (Step){.t = to - from,
                .from = from,
                .token_ids = s->token_ids ? s->token_ids + from : NULL,
                .positions = s->positions + from,
                .rotary = s->rotary + from,
                .limits = s->limits ? s->limits + from : NULL,
                .rows = s->rows + from,
                .hidden = s->hidden + from * m->hidden,
                .normed = s->normed + from * m->hidden,
                .qkv = s->qkv + from * wide,
                .mixed = s->mixed + from * q,
                .gates = s->gates + from * m->layers->gate_up.n,
                .acted = s->acted + from * m->inner,
                .adapters = s->adapters ? s->adapters + from : NULL,
                .reduced = s->reduced + from * s->reduced_stride,
                .reduced_stride = s->reduced_stride,
                .halves = s->halves,
                .o = end - first,
                .outputs = s->outputs + first,
                .logits = s->logits + first * m->head.n,
                .scratch = s->scratch + i * s->scratch_stride,
                .progress = s->progress};
}

static int64_t terms(const Linear *l) { return (int64_t)l->n * l->k; }

static int64_t terms_of_layer(const Layer *l) {
  return terms(&l->qkv) + terms(&l->out) + terms(&l->gate_up) + terms(&l->down);
}

/* What a position costs in a layer, in multiply-adds. */
static int64_t cost(const Model *m, int64_t position) {
  return terms_of_layer(m->layers) + READ_COST * 2 * (position + 1) * m->cache.kv_heads * m->cache.head_dim;
}

/* Cuts a step between sequences into `n_threads` shares of like cost. False where there is no such cut. */
static int share(const Model *m, const Step *s, Step *shares) {
  const int64_t weights = (m->n_layers * terms_of_layer(m->layers) + terms(&m->head)) * size_of(m->head.kind);
  const int n = s->n_threads;
  int64_t total = 0, done = 0, from = 0, before = 0;
  int made = 0;
  if (n == 1 || s->t < n * LEAST || weights > CACHED) return 0;
  for (int64_t t = 0; t < s->t; t++) total += cost(m, s->positions[t]);
  for (int64_t t = 0; t < s->t; t++) {
    const int last = t + 1 == s->t;
    done += cost(m, s->positions[t]);
    if (!last && (done < total / n * (made + 1) || s->rows[t] == s->rows[t + 1])) continue;
    if (made == n || t + 1 - from < LEAST || (done - before) * n > total + total / UNEQUAL) return 0;
    shares[made] = part_of(m, s, from, t + 1, made);
    made++;
    before = done;
    from = t + 1;
  }
  return made == n;
}

/* Whether all adapters of a step have the sizes of the model's maps. Others would write beyond a row's outputs. */
static int adapters_fit(const Model *m, const Step *s) {
  const Delta *last = NULL;
  for (int64_t t = 0; s->adapters && t < s->t; t++) {
    const Delta *deltas = s->adapters[t];
    if (!deltas || deltas == last) continue;
    for (int64_t i = 0; i < m->n_layers; i++) {
      const Linear *of[MAPS] = {&m->layers[i].qkv, &m->layers[i].out, &m->layers[i].gate_up, &m->layers[i].down};
      for (int64_t at = 0; at < MAPS; at++)
        if (!delta_fits(deltas + i * MAPS + at, of[at], s->reduced_stride)) return 0;
    }
    last = deltas;
  }
  return 1;
}

/* Returns how many maps the library has failed at, or -1 if an adapter does not fit: then nothing is computed. Shares are computed without it: its threads are those of a step. */
int32_t petiole_forward(const Model *m, const Step *s) {
  Step shares[s->n_threads];
  if (!adapters_fit(m, s)) return -1;
  if (!share(m, s, shares)) return compute(m, s, s->n_threads, m->library);
#pragma omp parallel for schedule(static, 1) num_threads(s->n_threads)
  for (int i = 0; i < s->n_threads; i++) compute(m, shares + i, 1, NULL);
  for (int i = 0; i < s->n_threads; i++) /* of each share its outputs' */
    memmove(s->hidden + (shares[i].outputs - s->outputs) * m->hidden, shares[i].hidden,
            sizeof(float) * (size_t)(shares[i].o * m->hidden));
  return 0;
}
