/* Attention over packed rows, forward and backward: a token sees its own row up to itself, or the last of that.

   Rows that begin with the same tokens name them by the same numbers and form a tree; a token's query attends once.
   A line is one query head of a token. Lines of one head of keys go through the keys in blocks, and scores exist for
   one block of lines and keys at a time: the backward pass makes them again from the logarithm of a line's sum
   (arXiv 2205.14135). Threads share out heads and rows, or in the backward pass heads and trees, so that every sum is
   one thread's, in one order. Heads are padded to whole vectors, by zeros. */
#include "vectors.h"

#if L == 16
#define R 8 /* lines of a tile: twice as many accumulators fit into the registers of processors with such vectors */
#else
#define R 4
#endif
#define LINES 64         /* lines of a block, or the heads of one token where they are more */
#define KEYS 128         /* keys of a block */
#define SPAN (KEYS + 16) /* from a line's scores to the next; with a power of two they would share few sets of a cache */
#define HIDDEN -1e30f    /* score of a key that a line does not see; LEAST is above it and below all others */
#define LEAST -1e29f

typedef struct {
  int64_t rows, trees, heads, kheads, D, window, threads; /* window 0: all */
  float scale, softcap;                                   /* softcap 0: none */
  const int64_t *source;                                  /* token at each place of the rows */
  const int64_t *begin, *end, *shared; /* of each row: its places, and how many tokens rows before have computed */
  const int64_t *tree;                 /* first row of each tree, and the number of rows */
  const float *q, *k, *v, *dout;       /* [C][heads][D] and [C][kheads][D] */
  float *out, *sums, *dq, *dk, *dv;    /* sums: logarithms of the lines' sums, [C][heads] */
} Pack;

typedef struct {
  int64_t row, head, n, W, G; /* tokens of the row, head size in whole vectors, lines of a token */
  const int64_t *at;          /* token at each place */
  int64_t t, count, lines;    /* first place, number of places and lines of the block of lines */
} Block;

typedef struct {
  int64_t from, to;
} Range;

/* y[r][c] (+)= sum over i of x[r * xr + i * xi] * w[i * wr + c], for R rows and V vectors of columns. */
static inline __attribute__((always_inline)) void tile(int V, int add, const float *x, int64_t xr, int64_t xi,
                                                       const float *w, int64_t wr, int64_t k, float *y, int64_t yr) {
  vec acc[R][2] = {};
  if (add)
    for (int r = 0; r < R; r++)
      for (int c = 0; c < V; c++) acc[r][c] = load(y + r * yr + c * L);
  for (int64_t i = 0; i < k; i++, x += xi, w += wr) {
    vec a = load(w), b = V > 1 ? load(w + L) : a;
    for (int r = 0; r < R; r++) {
      acc[r][0] += x[r * xr] * a;
      if (V > 1) acc[r][1] += x[r * xr] * b;
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < V; c++) store(y + r * yr + c * L, acc[r][c]);
}

static void add_product(const float *x, int64_t xr, int64_t xi, const float *w, int64_t k, float *y, int64_t W) {
  for (int64_t c = 0; c < W; c += N)
    if (c + L < W) tile(2, 1, x, xr, xi, w + c, W, k, y + c, W);
    else tile(1, 1, x, xr, xi, w + c, W, k, y + c, W);
}

/* Which keys of the block at b are seen from any of the places first .. last. */
static Range seen(const Pack *p, int64_t first, int64_t last, int64_t b) {
  int64_t from = p->window && first + 1 - p->window > b ? first + 1 - p->window - b : 0;
  return (Range){from, last + 1 - b < KEYS ? last + 1 - b : KEYS};
}

/* The same of R lines, and of one; lines behind the last are as that. */
static Range seen_by(const Pack *p, const Block *o, int64_t line, int64_t count, int64_t b) {
  int64_t first = line < o->lines ? line : o->lines - 1, last = line + count <= o->lines ? line + count - 1 : o->lines - 1;
  return seen(p, o->t + first / o->G, o->t + last / o->G, b);
}

/* One head of a row's keys or values: as they are, [n][W], or in panels of N keys, [n/N][W][N]. */
static void gather(const Pack *p, const Block *o, const float *from, float *rows, float *panels) {
  int64_t size = 4 * up_to(o->n, N) * o->W;
  if (rows) memset(rows, 0, size);
  if (panels) memset(panels, 0, size);
  for (int64_t j = 0; j < o->n; j++) {
    const float *x = from + (o->at[j] * p->kheads + o->head) * p->D;
    if (rows) memcpy(rows + j * o->W, x, 4 * p->D);
    if (panels)
      for (int64_t i = 0; i < p->D; i++) panels[j / N * N * o->W + i * N + j % N] = x[i];
  }
}

static int64_t cell(const Pack *p, const Block *o, int64_t line) {
  return o->at[o->t + line / o->G] * p->heads + o->head * o->G + line % o->G;
}

static void take_lines(const Pack *p, const Block *o, const float *from, float by, float *x) {
  memset(x + o->lines * o->W, 0, 4 * (up_to(o->lines, R) - o->lines) * o->W);
  for (int64_t i = 0; i < o->lines; i++) {
    const float *line = from + cell(p, o, i) * p->D;
    for (int64_t j = 0; j < o->W; j += L)
      store(x + i * o->W + j, by * (j + L <= p->D ? load(line + j) : load_part(line + j, p->D - j)));
  }
}

static void give_line(const Pack *p, const float *x, float by, float *line) {
  for (int64_t j = 0; j < p->D; j += L) {
    vec v = load(x + j) * by;
    if (j + L <= p->D) store(line + j, v);
    else memcpy(line + j, &v, 4 * (p->D - j));
  }
}

/* Products of the lines with the block of keys at b, where any of R lines sees any of N keys. */
static void scores(const Pack *p, const Block *o, const float *x, const float *panels, int64_t b, float *s) {
  for (int64_t j = 0; j < KEYS && b + j < o->t + o->count; j += N)
    for (int64_t i = 0; i < o->lines; i += R) {
      Range any = seen_by(p, o, i, R, b);
      if (j < any.to && j + N > any.from)
        tile(2, 0, x + i * o->W, o->W, 1, panels + (b + j) * o->W, N, o->W, s + i * SPAN + j, SPAN);
    }
}

static void fill(float *s, Range any, Range own, float x) { /* what a line does not see, within whole vectors */
  int64_t end = up_to(any.to, L);
  for (int64_t j = any.from / L * L; j < own.from && j < end; j++) s[j] = x;
  for (int64_t j = own.to > any.from / L * L ? own.to : any.from / L * L; j < end; j++) s[j] = x;
}

/* Scores of a line to its probabilities times sum; result and sum so far are those of a lower top. What is not finite
   makes the sum NaN, for vexp would hide it. */
static void soften(const Pack *p, float *s, Range any, Range own, float *top, vec *sum, float *out, int64_t W) {
  int64_t from = any.from / L * L;
  vec high = all(HIDDEN);
  if (p->softcap)
    for (int64_t j = from; j < any.to; j += L)
      store(s + j, p->softcap * vtanh(load(s + j) / p->softcap) + 0 * load(s + j));
  fill(s, any, own, HIDDEN);
  for (int64_t j = from; j < any.to; j += L) high = vmax(load(s + j), high);
  float m = highest(high);
  if (m > *top) {
    float by = expf(*top - m);
    for (int64_t i = 0; i < W; i += L) store(out + i, load(out + i) * by);
    *sum *= by, *top = m;
  }
  m = *top;
  vec more = {};
  for (int64_t j = from; j < any.to; j += L) {
    vec z = load(s + j), e = vexp(z - m);
    store(s + j, e);
    more += e + 0 * z;
  }
  *sum += more;
}

/* Scores s of a line to its probabilities, and products d of gradient and values to the scores' gradient. */
static void differentiate(const Pack *p, float *s, float *d, Range any, Range own, float sum, float mean) {
  for (int64_t j = any.from / L * L; j < any.to; j += L) {
    vec z = load(s + j), by = all(1);
    if (p->softcap) {
      vec u = vtanh(z / p->softcap);
      z = p->softcap * u, by = 1 - u * u;
    }
    z = vexp(z - sum);
    store(s + j, z), store(d + j, z * by * (load(d + j) - mean));
  }
  fill(s, any, own, 0), fill(d, any, own, 0);
}

static int64_t next_block(const Pack *p, Block *o) { /* the tokens after it that are this row's own */
  int64_t most = LINES / o->G ? LINES / o->G : 1;
  o->t += o->count;
  o->count = o->n - o->t < most ? o->n - o->t : most;
  o->lines = o->count * o->G;
  return o->count;
}
static int64_t first_key(const Pack *p, const Block *o) {
  return p->window && o->t + 1 > p->window ? (o->t + 1 - p->window) / KEYS * KEYS : 0;
}
static Block block(const Pack *p, int64_t row, int64_t head) {
  return (Block){row, head, p->end[row] - p->begin[row], up_to(p->D, L), p->heads / p->kheads,
                 p->source + p->begin[row], p->shared[row], 0, 0};
}

static void row_forward(const Pack *p, Block o, int64_t size, int64_t most, float *keys) {
  float *values = keys + size, *q = values + size, *out = q + most * o.W, *s = out + most * o.W, *top = s + most * SPAN;
  vec *sum = (vec *)(top + most);
  gather(p, &o, p->k, 0, keys), gather(p, &o, p->v, values, 0);
  while (next_block(p, &o)) {
    int64_t padded = up_to(o.lines, R);
    take_lines(p, &o, p->q, p->scale, q);
    memset(out, 0, 4 * padded * o.W), memset(sum, 0, sizeof(vec) * padded);
    for (int64_t i = 0; i < padded; i++) top[i] = LEAST;
    for (int64_t b = first_key(p, &o); b < o.t + o.count; b += KEYS) {
      scores(p, &o, q, keys, b, s);
      for (int64_t i = 0; i < o.lines; i += R) {
        Range any = seen_by(p, &o, i, R, b);
        if (any.from >= any.to) continue;
        for (int64_t r = i; r < i + R; r++)
          soften(p, s + r * SPAN, any, seen_by(p, &o, r, 1, b), top + r, sum + r, out + r * o.W, o.W);
        add_product(s + i * SPAN + any.from, SPAN, 1, values + (b + any.from) * o.W, any.to - any.from, out + i * o.W, o.W);
      }
    }
    for (int64_t i = 0; i < o.lines; i++) {
      float whole = halved(sum[i]);
      give_line(p, out + i * o.W, 1 / whole, p->out + cell(p, &o, i) * p->D);
      p->sums[cell(p, &o, i)] = top[i] + logf(whole);
    }
  }
}

/* Gradients of a block of lines with the block of keys at b: those of the queries, and of the row's keys and values. */
static void block_backward(const Pack *p, const Block *o, int64_t b, const float *q, const float *g, const float *s,
                           const float *d, const float *keys, float *dq, float *dk, float *dv) {
  for (int64_t i = 0; i < o->lines; i += R) {
    Range any = seen_by(p, o, i, R, b);
    if (any.from < any.to)
      add_product(d + i * SPAN + any.from, SPAN, 1, keys + (b + any.from) * o->W, any.to - any.from, dq + i * o->W, o->W);
  }
  for (int64_t j = 0; j < KEYS && b + j < o->t + o->count; j += R) { /* R keys, and the lines that see any of them */
    int64_t first = b + j > o->t ? b + j - o->t : 0, last = o->count;
    if (p->window && b + j + R - 1 + p->window - o->t < last) last = b + j + R - 1 + p->window - o->t;
    if (first >= last) continue;
    int64_t i = first * o->G, count = (last - first) * o->G;
    add_product(d + i * SPAN + j, 1, SPAN, q + i * o->W, count, dk + (b + j) * o->W, o->W);
    add_product(s + i * SPAN + j, 1, SPAN, g + i * o->W, count, dv + (b + j) * o->W, o->W);
  }
}

static void row_backward(const Pack *p, Block o, int64_t size, int64_t most, float *keys) {
  float *kpanels = keys + size, *vpanels = kpanels + size, *dk = vpanels + size, *dv = dk + size, *q = dv + size;
  float *g = q + most * o.W, *dq = g + most * o.W, *s = dq + most * o.W, *d = s + most * SPAN, *mean = d + most * SPAN;
  gather(p, &o, p->k, keys, kpanels), gather(p, &o, p->v, 0, vpanels);
  memset(dk, 0, 4 * size), memset(dv, 0, 4 * size);
  while (next_block(p, &o)) {
    int64_t padded = up_to(o.lines, R);
    take_lines(p, &o, p->out, 1, dq), take_lines(p, &o, p->dout, 1, g), take_lines(p, &o, p->q, p->scale, q);
    for (int64_t i = 0; i < padded; i++) {
      vec sum = {};
      for (int64_t j = 0; j < o.W; j += L) sum += load(dq + i * o.W + j) * load(g + i * o.W + j);
      mean[i] = halved(sum);
    }
    memset(dq, 0, 4 * padded * o.W);
    for (int64_t b = first_key(p, &o); b < o.t + o.count; b += KEYS) {
      scores(p, &o, q, kpanels, b, s), scores(p, &o, g, vpanels, b, d);
      for (int64_t r = 0; r < padded; r++) {
        Range any = seen_by(p, &o, r / R * R, R, b);
        float sum = r < o.lines ? p->sums[cell(p, &o, r)] : 0;
        if (any.from < any.to)
          differentiate(p, s + r * SPAN, d + r * SPAN, any, seen_by(p, &o, r, 1, b), sum, mean[r]);
      }
      block_backward(p, &o, b, q, g, s, d, keys, dq, dk, dv);
    }
    for (int64_t i = 0; i < o.lines; i++) give_line(p, dq + i * o.W, p->scale, p->dq + cell(p, &o, i) * p->D);
  }
  for (int64_t j = 0; j < o.n; j++) { /* the row that a token is own to is the first that has a gradient for it */
    int64_t to = (o.at[j] * p->kheads + o.head) * p->D;
    for (int64_t i = 0; i < p->D && j < p->shared[o.row]; i++)
      dk[j * o.W + i] += p->dk[to + i], dv[j * o.W + i] += p->dv[to + i];
    give_line(p, dk + j * o.W, 1, p->dk + to), give_line(p, dv + j * o.W, 1, p->dv + to);
  }
}

/* Fills out and sums, or backwards dq, dk and dv; gives 1 where memory is short. */
int attend(const Pack *p, int64_t backward) {
  int64_t W = up_to(p->D, L), G = p->heads / p->kheads, longest = 0, work = 0;
  for (int64_t r = 0; r < p->rows; r++) {
    int64_t n = p->end[r] - p->begin[r];
    longest = n > longest ? n : longest;
    work += (n - p->shared[r]) * n * p->heads * W;
  }
  int64_t size = up_to(longest, N) * W, most = up_to(G > LINES ? G : LINES, R), threads = work > WORTH ? p->threads : 1;
  int64_t each = up_to((backward ? 5 : 2) * size + most * (3 * W + 2 * SPAN + 1 + L), 16);
  float *memory = room(threads * each);
  if (!memory) return 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t n = 0; n < (backward ? p->trees : p->rows) * p->kheads; n++) {
    float *own = memory + thread() * each;
    int64_t unit = n / p->kheads, head = n % p->kheads;
    if (!backward) row_forward(p, block(p, unit, head), size, most, own);
    else
      for (int64_t r = p->tree[unit]; r < p->tree[unit + 1]; r++)
        row_backward(p, block(p, r, head), size, most, own);
  }
  free(memory);
  return 0;
}
