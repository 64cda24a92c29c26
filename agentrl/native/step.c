/* A decoder's step: new tokens of any rows in; hidden states, sampled tokens and their log-probs out.

   Every sum of a token runs in an order that depends on that token and its row alone: products go through their inputs
   one after the other, attention goes through its keys in blocks of lanes, and masked lanes add exact zeros. So a
   token's bits depend neither on the rows beside it nor on how its row was cut into steps, and nothing is padded.
   No loop here leaves a scalar rest behind: a compiler may round that in another way than the vectors before it.

   Weights lie in panels of N outputs, [outputs/N][inputs][N]. A row has one piece of memory, [layer][2][head][cap * D]:
   keys in blocks of lanes, [cap/L][D][L], and values, [cap][D], with L floats behind the last. */
#include "vectors.h"

#define BLOCK 64       /* tokens that go through all layers at a time */
#define TOGETHER 4     /* tokens of a row that attend at a time, at most */
#define CHUNK 1024     /* vocabulary entries that are summed in single precision before they join the double sum */

typedef struct {
  const float *before_attn, *after_attn, *before_mlp, *after_mlp; /* norms; after_* may be NULL */
  const float *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *gate_up, *down;
  const float *turns; /* cos and sin, [positions][2][rotated/2] */
  int64_t window;     /* keys that a token sees, its own included; 0: all */
} Layer;

typedef struct {
  int64_t layers, d, heads, kheads, D, ff, vocab, gelu, rotated;
  float eps, scale, softcap, final_cap, embed_scale, logit_scale;
  const float *embed, *norm, *head; /* embed [vocab][d], or NULL where it is the head, which is in panels */
  const Layer *layer;
} Model;

static int threads = 1;
void use_threads(int64_t count) { threads = (int)count; }
int64_t panel(void) { return N; }

/* y[r][n] = bias[n] + sum over i of x[r][i] w[n][i], for R rows, so that a panel is read once for all of them. */
#define KERNEL(R)                                                                                                  \
  static void kernel##R(const float *x, int64_t sx, const float *w, int64_t k, float *y, int64_t sy, int64_t cols, \
                        const float *bias) {                                                                       \
    vec acc[R][2] = {};                                                                                            \
    for (int64_t i = 0; i < k; i++) {                                                                              \
      vec b0 = load(w + i * N), b1 = load(w + i * N + L);                                                          \
      for (int r = 0; r < R; r++) {                                                                                \
        float a = x[r * sx + i];                                                                                   \
        acc[r][0] += a * b0;                                                                                       \
        acc[r][1] += a * b1;                                                                                       \
      }                                                                                                            \
    }                                                                                                              \
    for (int r = 0; r < R; r++) {                                                                                  \
      if (bias) acc[r][0] += load(bias), acc[r][1] += load(bias + L);                                              \
      if (cols == N) store(y + r * sy, acc[r][0]), store(y + r * sy + L, acc[r][1]);                               \
      else memcpy(y + r * sy, acc[r], cols * 4);                                                                   \
    }                                                                                                              \
  }
KERNEL(1) KERNEL(2) KERNEL(4)
#if L == 16
KERNEL(8) /* the processors with such vectors have twice the registers */
#endif

static void product(const float *x, int64_t m, int64_t k, const float *w, const float *bias, float *y, int64_t n) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && m * k * n > WORTH)
  for (int64_t p = 0; p < n; p += N) {
    const float *panel = w + p * k, *b = bias ? bias + p : 0;
    int64_t cols = n - p < N ? n - p : N, r = 0;
#if L == 16
    for (; r + 8 <= m; r += 8) kernel8(x + r * k, k, panel, k, y + r * n + p, n, cols, b);
#endif
    for (; r + 4 <= m; r += 4) kernel4(x + r * k, k, panel, k, y + r * n + p, n, cols, b);
    if (r + 2 <= m) kernel2(x + r * k, k, panel, k, y + r * n + p, n, cols, b), r += 2;
    if (r < m) kernel1(x + r * k, k, panel, k, y + r * n + p, n, cols, b);
  }
}

static void rms(const float *x, const float *w, float *y, int64_t d, float eps) {
  int64_t whole = d / L * L, rest = d - whole;
  vec last = load_part(x + whole, rest), sum = last * last;
  for (int64_t i = 0; i < whole; i += L) sum += load(x + i) * load(x + i);
  float by = 1.0f / sqrtf(total(sum) / d + eps);
  for (int64_t i = 0; i < whole; i += L) store(y + i, load(x + i) * by * load(w + i));
  last = last * by * load_part(w + whole, rest);
  memcpy(y + whole, &last, 4 * rest);
}

static inline void turn_part(float *x, const float *at, int64_t half, int64_t count) {
  vec a = load_part(x, count), b = load_part(x + half, count), c = load_part(at, count), s = load_part(at + half, count);
  vec first = a * c - b * s, second = b * c + a * s;
  memcpy(x, &first, 4 * count), memcpy(x + half, &second, 4 * count);
}

static void turn(float *x, const float *at, int64_t rotated) {
  int64_t half = rotated / 2, i = 0;
  for (; i + L <= half; i += L) turn_part(x + i, at + i, half, L);
  if (i < half) turn_part(x + i, at + i, half, half - i);
}

static void add(float *x, const float *y, int64_t n) {
  int64_t i = 0;
  for (; i + L <= n; i += L) store(x + i, load(x + i) + load(y + i));
  vec sum = load_part(x + i, n - i) + load_part(y + i, n - i);
  memcpy(x + i, &sum, 4 * (n - i));
}

/* Products of R queries with the blocks of keys from .. to, into R rows of scores. */
#define SCORES(R)                                                                                                  \
  static void scores##R(const float *const *q, const float *keys, int64_t D, int64_t from, int64_t to, float *s,  \
                        int64_t span) {                                                                            \
    for (int64_t b = from; b < to; b++) {                                                                          \
      const float *block = keys + b * L * D;                                                                       \
      vec acc[R] = {};                                                                                             \
      for (int64_t i = 0; i < D; i++) {                                                                            \
        vec k = load(block + i * L);                                                                               \
        for (int r = 0; r < R; r++) acc[r] += q[r][i] * k;                                                         \
      }                                                                                                            \
      for (int r = 0; r < R; r++) store(s + r * span + (b - from) * L, acc[r]);                                    \
    }                                                                                                              \
  }
/* Sums of the values first .. last, weighed by R rows of probabilities p, whose sums are 1/by. */
#define MIXED(R)                                                                                                   \
  static void mixed##R(const float *p, int64_t span, const float *by, const float *values, int64_t D,             \
                       int64_t count, float *const *out) {                                                         \
    for (int64_t i = 0; i < D; i += 2 * L) {                                                                       \
      vec acc[R][2] = {};                                                                                          \
      if (i + L < D)                                                                                               \
        for (int64_t j = 0; j < count; j++) {                                                                      \
          vec a = load(values + j * D + i), b = load(values + j * D + i + L);                                      \
          for (int r = 0; r < R; r++) acc[r][0] += p[r * span + j] * a, acc[r][1] += p[r * span + j] * b;          \
        }                                                                                                          \
      else                                                                                                         \
        for (int64_t j = 0; j < count; j++) {                                                                      \
          vec a = load(values + j * D + i);                                                                        \
          for (int r = 0; r < R; r++) acc[r][0] += p[r * span + j] * a;                                            \
        }                                                                                                          \
      for (int r = 0; r < R; r++) {                                                                                \
        acc[r][0] *= by[r], acc[r][1] *= by[r];                                                                    \
        if (i + 2 * L <= D) store(out[r] + i, acc[r][0]), store(out[r] + i + L, acc[r][1]);                        \
        else memcpy(out[r] + i, acc[r], 4 * (D - i));                                                              \
      }                                                                                                            \
    }                                                                                                              \
  }
SCORES(1) SCORES(2) SCORES(4) MIXED(1) MIXED(2) MIXED(4)

/* Scores to probabilities times their sum, in place; gives 1 / that sum. */
static float softmax(const Model *m, float *s, int64_t span, int64_t begin, int64_t end) {
  vec high = all(-INFINITY), sum = {};
  for (int64_t i = 0; i < span; i += L) {
    vec z = load(s + i) * m->scale;
    if (m->softcap) z = m->softcap * vtanh(z / m->softcap);
    store(s + i, z);
  }
  for (int64_t i = 0; i < begin; i++) s[i] = -INFINITY;
  for (int64_t i = end; i < span; i++) s[i] = -INFINITY;
  for (int64_t i = 0; i < span; i += L) high = vmax(high, load(s + i));
  float top = highest(high);
  for (int64_t i = 0; i < span; i += L) {
    vec e = vexp(load(s + i) - top);
    store(s + i, e);
    sum += e;
  }
  return 1.0f / total(sum);
}

/* One head of keys: count tokens of a row, the first at pos, attend with all queries that share it. */
static void attend(const Model *m, int64_t window, const float *q, int64_t stride, const float *keys,
                   const float *values, int64_t pos, int64_t count, float *out, float *s) {
  int64_t D = m->D, G = m->heads / m->kheads, pairs = count * G, r = 0;
  int64_t first = window && pos + 1 > window ? pos + 1 - window : 0, end = pos + count; /* seen by any of them */
  int64_t from = first / L, to = (end - 1) / L + 1, span = (to - from) * L, skip = first - from * L;
  const float *query[TOGETHER * G];
  float *result[TOGETHER * G], by[TOGETHER * G];
  for (int64_t i = 0; i < pairs; i++) {
    query[i] = q + i / G * stride + i % G * D;
    result[i] = out + i / G * m->heads * D + i % G * D;
  }
  for (; r + 4 <= pairs; r += 4) scores4(query + r, keys, D, from, to, s + r * span, span);
  if (r + 2 <= pairs) scores2(query + r, keys, D, from, to, s + r * span, span), r += 2;
  if (r < pairs) scores1(query + r, keys, D, from, to, s + r * span, span);
  for (int64_t i = 0; i < pairs; i++) {
    int64_t own = pos + i / G, begin = window && own + 1 > window ? own + 1 - window : 0;
    by[i] = softmax(m, s + i * span, span, begin - from * L, own + 1 - from * L);
  }
  values += first * D, s += skip;
  for (r = 0; r + 4 <= pairs; r += 4) mixed4(s + r * span, span, by + r, values, D, end - first, result + r);
  if (r + 2 <= pairs) mixed2(s + r * span, span, by + r, values, D, end - first, result + r), r += 2;
  if (r < pairs) mixed1(s + r * span, span, by + r, values, D, end - first, result + r);
}

typedef struct {
  int64_t begin, count;
} Group; /* tokens that follow each other in one row */

static int64_t groups_of(int64_t count, const int64_t *pos, float *const *kv, Group *groups) {
  int64_t found = 0;
  for (int64_t t = 0; t < count; t++) {
    Group *last = groups + found - 1;
    if (found && last->count < TOGETHER && kv[t] == kv[t - 1] && pos[t] == pos[t - 1] + 1) last->count++;
    else groups[found++] = (Group){t, 1};
  }
  return found;
}

static void embed(const Model *m, int64_t token, float *x) {
  const float *from = m->embed ? m->embed + token * m->d : m->head + token / N * N * m->d + token % N;
  int64_t step = m->embed ? 1 : N;
  for (int64_t i = 0; i < m->d; i++) x[i] = from[i * step] * m->embed_scale;
}

static void activate(const Model *m, int64_t count, const float *gate_up, float *out) {
  for (int64_t t = 0; t < count; t++)
    for (int64_t i = 0; i < m->ff; i += L) { /* ff is padded to whole vectors */
      vec g = load(gate_up + t * 2 * m->ff + i), u = load(gate_up + t * 2 * m->ff + m->ff + i), act;
      if (m->gelu) act = 0.5f * g * (1.0f + vtanh(0.7978845608f * (g + 0.044715f * g * g * g)));
      else act = g / (1.0f + vexp(-g));
      store(out + t * m->ff + i, act * u);
    }
}

/* Norm and turn the queries and keys of count tokens, and keep keys and values in their rows. */
static void keep(const Model *m, int64_t l, int64_t count, const int64_t *pos, float *const *kv, const int64_t *cap,
                 float *qkv) {
  const Layer *w = m->layer + l;
  int64_t D = m->D, H = m->heads, K = m->kheads;
  for (int64_t t = 0; t < count; t++) {
    float *q = qkv + t * (H + 2 * K) * D;
    for (int64_t i = 0; i < H + K; i++) {
      const float *norm = i < H ? w->q_norm : w->k_norm;
      if (norm) rms(q + i * D, norm, q + i * D, D, m->eps);
      turn(q + i * D, w->turns + pos[t] * m->rotated, m->rotated);
    }
    for (int64_t i = 0; i < K; i++) {
      float *keys = kv[t] + (2 * l * K + i) * cap[t] * D, *values = keys + K * cap[t] * D;
      const float *k = q + (H + i) * D, *v = k + K * D;
      float *slot = keys + pos[t] / L * L * D + pos[t] % L;
      for (int64_t j = 0; j < D; j++) slot[j * L] = k[j];
      memcpy(values + pos[t] * D, v, 4 * D);
    }
  }
}

/* Hidden states [count][d] of tokens, each at pos[t] of the row whose memory is kv[t], with room for cap[t] tokens;
   those of a row come in order. Gives 1 where memory is short. */
int forward(const Model *m, int64_t count, const int64_t *tokens, const int64_t *pos, float *const *kv,
            const int64_t *cap, float *hidden) {
  int64_t d = m->d, D = m->D, H = m->heads, K = m->kheads, all_heads = H + 2 * K, longest = 0;
  for (int64_t t = 0; t < count; t++) longest = pos[t] > longest ? pos[t] : longest;
  int64_t span = (longest / L + 2) * L * (H / K) * TOGETHER;
  int64_t wide = 2 * m->ff > all_heads * D ? 2 * m->ff : all_heads * D;
  float *x = room(BLOCK * (2 * d + wide + m->ff + H * D) + threads * span);
  if (!x) return 1;
  float *h = x + BLOCK * d, *a = h + BLOCK * d, *b = a + BLOCK * wide, *o = b + BLOCK * m->ff, *s = o + BLOCK * H * D;
  for (int64_t begin = 0; begin < count; begin += BLOCK) {
    int64_t T = count - begin < BLOCK ? count - begin : BLOCK;
    const int64_t *at = pos + begin, *caps = cap + begin;
    float *const *rows = kv + begin;
    Group groups[BLOCK];
    int64_t pieces = groups_of(T, at, rows, groups) * K;
    for (int64_t t = 0; t < T; t++) embed(m, tokens[begin + t], x + t * d);
    for (int64_t l = 0; l < m->layers; l++) {
      const Layer *w = m->layer + l;
      for (int64_t t = 0; t < T; t++) rms(x + t * d, w->before_attn, h + t * d, d, m->eps);
      product(h, T, d, w->qkv, w->qkv_bias, a, all_heads * D);
      keep(m, l, T, at, rows, caps, a);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && T * (longest + 1) * H * D > WORTH)
      for (int64_t n = 0; n < pieces; n++) {
        int64_t t = groups[n / K].begin, i = n % K, size = caps[t] * D;
        const float *keys = rows[t] + (2 * l * K + i) * size;
        attend(m, w->window, a + (t * all_heads + i * (H / K)) * D, all_heads * D, keys, keys + K * size, at[t],
               groups[n / K].count, o + (t * H + i * (H / K)) * D, s + thread() * span);
      }
      product(o, T, H * D, w->out, w->out_bias, h, d);
      if (w->after_attn)
        for (int64_t t = 0; t < T; t++) rms(h + t * d, w->after_attn, h + t * d, d, m->eps);
      add(x, h, T * d);
      for (int64_t t = 0; t < T; t++) rms(x + t * d, w->before_mlp, h + t * d, d, m->eps);
      product(h, T, d, w->gate_up, 0, a, 2 * m->ff);
      activate(m, T, a, b);
      product(b, T, m->ff, w->down, 0, h, d);
      if (w->after_mlp)
        for (int64_t t = 0; t < T; t++) rms(h + t * d, w->after_mlp, h + t * d, d, m->eps);
      add(x, h, T * d);
    }
    for (int64_t t = 0; t < T; t++) rms(x + t * d, m->norm, hidden + (begin + t) * d, d, m->eps);
  }
  free(x);
  return 0;
}

static double uniform(uint64_t seed, uint64_t counter) { /* the same as engines/rng.py gives */
  uint64_t z = seed + (counter + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return (double)(z >> 11) * 0x1p-53;
}

/* Scale and cap a row's logits, and put -inf behind them, up to wide; gives the highest. */
static float prepare(const Model *m, float *z, int64_t wide, float temperature) {
  float by = temperature == 0 ? 1.0f : 1.0f / temperature;
  vec high = all(-INFINITY);
  for (int64_t i = 0; i < m->vocab; i += L) {
    vec v = load(z + i) * m->logit_scale;
    if (m->final_cap) v = m->final_cap * vtanh(v / m->final_cap);
    store(z + i, v * by);
  }
  for (int64_t i = m->vocab; i < wide; i++) z[i] = -INFINITY;
  for (int64_t i = 0; i < wide; i += L) high = vmax(high, load(z + i));
  return highest(high);
}

/* One token for each of count hidden states, by inverse transform over the sums of e^((z - highest) / temperature),
   and its log-prob. Gives 1 where memory is short. */
int sample(const Model *m, int64_t count, const float *hidden, const float *temperature, const int64_t *seed,
           const int64_t *counter, int64_t *token, float *logp) {
  int64_t V = m->vocab, wide = up_to(V, CHUNK);
  float *logits = room(count * V + L + wide), *z = logits + up_to(count * V, L);
  double *sums = malloc(8 * (wide / CHUNK));
  if (!logits || !sums) return free(logits), free(sums), 1;
  product(hidden, count, m->d, m->head, 0, logits, V);
  for (int64_t r = 0; r < count; r++) {
    memcpy(z, logits + r * V, 4 * V);
    memset(z + V, 0, 4 * (wide - V));
    float top = prepare(m, z, wide, temperature[r]);
    if (temperature[r] == 0) {
      int64_t i = 0;
      while (i < V - 1 && z[i] != top) i++; /* where all are NaN, the last */
      token[r] = i, logp[r] = 0;
      continue;
    }
    double sum = 0;
    for (int64_t c = 0; c < wide; c += CHUNK) {
      vec part = {};
      for (int64_t i = c; i < c + CHUNK; i += L) part += vexp(load(z + i) - top);
      sum += sums[c / CHUNK] = total(part);
    }
    double point = uniform(seed[r], counter[r]) * sum, before = 0;
    int64_t c = 0, chosen = -1;
    while (c + CHUNK < wide && before + sums[c / CHUNK] <= point) before += sums[c / CHUNK], c += CHUNK;
    for (int64_t i = c, done = 0; i < c + CHUNK && !done; i += L) { /* in the chunk that holds the point */
      vec e = vexp(load(z + i) - top);
      for (int j = 0; j < L && !done; j++) {
        before += e[j];
        if (e[j] > 0) chosen = i + j;
        done = before > point;
      }
    }
    if (chosen < 0) /* rounding put the point behind everything: the last token that has a probability */
      for (chosen = V - 1; chosen > 0 && z[chosen] - top <= -87.0f;) chosen--;
    token[r] = chosen;
    float lp = z[chosen] - top - (float)log(sum);
    logp[r] = lp > 0 ? 0 : lp;
  }
  free(logits), free(sums);
  return 0;
}

/* Put weights [n][k] into panels of outputs with inputs entries each, which are k at least, from output offset on. */
void pack(const float *w, int64_t n, int64_t k, int64_t inputs, int64_t offset, float *panels) {
  for (int64_t r = 0, count; r < n; r += count) { /* the rows that go into one panel */
    int64_t first = (offset + r) % N;
    float *out = panels + (offset + r) / N * N * inputs + first;
    count = n - r < N - first ? n - r : N - first;
    for (int64_t i = 0; i < k; i++)
      for (int64_t j = 0; j < count; j++) out[i * N + j] = w[(r + j) * k + i];
  }
}

/* Copy the first length tokens of one row's keys and values to another, or to a larger piece of memory. */
void copy_prefix(const Model *m, const float *from, int64_t cap, float *to, int64_t to_cap, int64_t length) {
  int64_t whole = up_to(length, L) * m->D;
  for (int64_t i = 0; i < 2 * m->layers * m->kheads; i++)
    memcpy(to + i * to_cap * m->D, from + i * cap * m->D, 4 * whole);
}
