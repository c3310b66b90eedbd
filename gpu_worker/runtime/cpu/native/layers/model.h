/* A model and a step, as the caller lays them out. */
#pragma once
#include "../arithmetic/functions.h"
#include "../attention/heads.h"
#include "../products/adapters.h"
#include "../recurrent/recurrent.h"

enum { NO_NORM = 0, RMS = 1, LAYER_NORM = 2 };

/* The norm of a vector: divided by its root mean square, or less its mean and divided by its deviation. Then times `weight`
 * and plus `bias`, where these are not null. */
typedef struct {
  int32_t kind;
  float eps;
  const float *weight, *bias;
} Norm;

/* The matrices of a layer, in their order. Of a mixer that keeps a state QKV gives its inputs, and NET_GATES its gates. With
 * latents NET_GATES gives queries, where QKV gives what they are made of. */
enum { QKV, NET_GATES, OUT, GATE_UP, DOWN, ROUTER, PER_LAYER_GATE, PER_LAYER_OUT, MAPS };

#define ADAPTED 4 /* matrices of attention and of a feed-forward, which LoRA adapters change */

enum { SOFTMAX = 0, OF_CHOSEN = 1, SIGMOID = 2 };

/* Feed-forwards of which a position takes some. See models/plan.py and experts.c. */
typedef struct {
  int32_t n, chosen, score, normalised, groups, best_groups;
  int32_t of_group; /* scores of a group that count for it: 1 or 2 */
  int32_t of_stream; /* the router reads the hidden state over its root mean square, times `scale`; else what experts read */
  int32_t inner, activation, gated;
  float factor, eps;
  Bend bend;
  const float *correction, *scale, *shares; /* [n] added to scores for the choice; [hidden]; [n] factors of weights; or null */
  const Linear *gate_up, *down;             /* [n] */
  const float *dense_gate;                  /* [hidden]: the dense output is multiplied by sigmoid of a product; or null */
  int64_t *taken;                           /* [n] how many positions each has computed */
  Norm norm, out_norm, dense_out_norm;      /* norm: of what experts read; without one they read what GATE_UP does */
} Experts;

/* Attention over latents: a position has one vector of `turning` + `rank` numbers in place of keys and values. See
 * plan.Latent and latents.c. */
typedef struct {
  int32_t turning, rank, own, value;
  const Linear *keys, *values; /* [heads]: own -> rank, rank -> value */
  Norm norm, query_norm;       /* of latents; of what NET_GATES makes queries of */
} Latents;

/* What a layer makes of the hidden state h:
 *
 *     x = mixer_norm(h);         h += residual * mixer_out_norm(mixer(x))
 *     x = feed_forward_norm(h);  h += residual * feed_forward_out_norm(feed_forward(x))
 *                                with experts: feed_forward(x) = dense_out_norm(dense(x)) + out_norm(experts(norm(h)))
 *     h += per_layer_norm(per_layer_out(act(per_layer_gate(h)) * per-layer input))
 *     h *= scalar
 *
 * parallel: the feed-forward reads h as it was before the mixer, or without a norm of its own the x of the mixer.
 * post_norm: h = mixer_norm(h + mixer(h)), and so on. */
typedef struct {
  Norm mixer_norm, mixer_out_norm, feed_forward_norm, feed_forward_out_norm;
  Linear maps[MAPS]; /* of no outputs: there is none */
  Norm q_norm, k_norm, v_norm;
  Norm net_norm; /* of each head's output in a delta net, of all groups of them in a scan */
  Norm per_layer_norm;
  Heads heads;
  const float *rotary; /* [positions, rotary_dims]: cos | sin, of the first elements of a head; or null */
  const float *growth; /* [positions] factors of queries, or null */
  int32_t rotary_dims;
  int32_t neighbours; /* element 2 i is rotated with 2 i + 1; else element i with i + rotary_dims / 2 */
  int32_t shape;           /* layers whose heads have the same sizes share one: see Model */
  int32_t borrowed;        /* whether the keys and values are another layer's: this one has none */
  int32_t values_are_keys; /* values are keys before their norm and rotation */
  int32_t output_gate;     /* after each head of queries lies its gate */
  int32_t norm_whole;      /* the norms of queries and of keys stand over all heads at once */
  int32_t inner, activation, gated;
  int32_t per_layer, per_layer_activation; /* numbers of the per-layer input, or 0 */
  int32_t parallel, post_norm;
  Bend bend;
  float residual, scalar;
  const Experts *experts; /* or null */
  const Latents *latents; /* or null */
  const Recurrent *recurrent; /* the mixer, if it keeps a state; null: it is attention */
} Layer;

/* Where an adapter has what it adds to one of a layer's matrices; -1: it has nothing for that matrix. */
INLINE int64_t adapted_at(const Layer *l, int64_t map) {
  const int64_t at = map == QKV ? 0 : map >= OUT && map <= DOWN ? map - NET_GATES : -1;
  return l->recurrent && map < GATE_UP ? -1 : at;
}

/* Floats for each position of a step. */
typedef struct {
  int64_t qkv, mixed, gates, acted, terms; /* the most of any layer; terms: of a sum, or numbers of a head */
  int64_t experts; /* the most of any layer */
  int64_t room;    /* of a thread, for the mixer of any layer that keeps a state */
} Widths;

typedef struct {
  int32_t n_layers, hidden, n_shapes, last_kept; /* last_kept: the last layer that stores keys and values, or a state */
  const Layer *layers;
  const Heads *const *shapes; /* [n_shapes] heads of each shape */
  Widths widths;
  Norm embedding_norm; /* of the first layer's inputs */
  Norm norm;
  Linear head; /* of no outputs: there is none */
  /* per-layer input = per_layer_factor (per_layer_embedding_factor row of a table
   *                                     + per_layer_norm(per_layer_projection_factor per_layer_projection(h))),
   * with the norm over each layer's part; without outputs of the projection there is none */
  Linear per_layer_projection;
  Norm per_layer_norm;
  int32_t per_layer_width;
  float per_layer_embedding_factor, per_layer_projection_factor, per_layer_factor;
  float embedding_factor, logits_factor, logits_cap; /* logits l become cap tanh(l / cap); 0: none */
  int64_t small; /* one thread computes steps that cost at most this. See shares.h */
} Model;

typedef struct {
  int64_t t, from;          /* positions of the step, or of the share of it that begins at `from` */
  const int64_t *token_ids; /* [t], or null: hidden holds their embeddings */
  const int64_t *positions; /* [t] */
  const int64_t *rotary;    /* [t] the positions by which queries and keys are rotated */
  const int64_t *limits;    /* [t] the end of the positions that each sees, or null: all up to itself */
  const int64_t *rows;      /* [t] page-table rows */
  const int64_t *copies;    /* [t] the place to which the states after a position are copied, or -1; or null */
  const float *extra;       /* [t, hidden], which is added to the embeddings, or null */
  float *per_layer;         /* [t, layers, per_layer_width]: rows of the table, which become per-layer inputs; or null */
  float *projected;         /* [t, layers, per_layer_width] */
  int64_t per_layer_stride; /* from one position to the next */
  float *hidden;            /* [t, hidden]; in the end [o, hidden], the outputs' alone, before the last norm */
  float *normed;            /* [t, hidden], and like `mixed` and `acted` maybe packed */
  float *qkv;               /* [t, queries, keys and values, or inputs of a mixer that keeps a state] */
  float *mixed;             /* [t, q] */
  float *gates;             /* [t, outputs of gate_up]; unused where these are GATED; before, those of net_gates */
  float *queries;           /* [t, q], of layers with latents */
  float *head_in, *head_out; /* [heads, t, ...]: inputs and outputs of the heads' own matrices */
  float *acted;             /* [t, inner] */
  float *added;             /* [t, hidden]: what a product gives, where it is not added to `hidden` as it is */
  float *streamed;          /* [t, hidden]: inputs of routers that read the hidden state */
  float *scores;            /* [t, experts] */
  int32_t *chosen, *places; /* [t, chosen] experts, ascending; where among the pairs each lies */
  float *shares, *openings; /* [t, chosen]; [t] factors of the dense outputs */
  float *pairs;             /* [t * chosen, hidden]: of a position and an expert, by expert; inputs, then outputs */
  float *pair_gates, *pair_acted; /* [t * chosen, outputs of gate_up], [t * chosen, inner] */
  int64_t *routes;          /* [3][experts + 1], see experts.c */
  const LowRank *const *adapters; /* [t] low-rank pairs, [layers][ADAPTED], or null; null where the step has none */
  float *reduced;           /* [t, most outputs of an A], where there are adapters */
  int64_t reduced_stride;
  int64_t o;                /* positions whose results are wanted */
  const int64_t *outputs;   /* [o] those, ascending */
  float *logits;            /* [o, vocab], out; or null */
  int32_t n_threads;
  char *scratch;            /* [threads] of `scratch_stride` bytes; see petiole_scratch */
  int64_t scratch_stride;
  void (*progress)(void);   /* called every REPORT_S seconds of a step, between two products; or null */
} Step;
