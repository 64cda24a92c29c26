/* What the sources beside this share: vectors as wide as the processor's, and the functions of them. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__AVX512F__) /* a vector wider than the processor's goes through memory, 15 times slower */
#define L 16
#elif defined(__AVX__)
#define L 8
#else
#define L 4
#endif
#define N (2 * L)      /* outputs of a panel */
#define WORTH (1 << 22) /* multiplications from which more than one thread pays */
typedef float vec __attribute__((vector_size(4 * L), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * L), aligned(4)));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec v) { *(vec *)p = v; }
static inline vec all(float x) { return x - (vec){}; }
static inline vec load_part(const float *p, int64_t count) { /* zeros behind the first count */
  vec v = {};
  memcpy(&v, p, 4 * count);
  return v;
}
static inline int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
static inline float *room(int64_t floats) { return aligned_alloc(64, up_to(4 * floats, 64)); }
static inline float total(vec v) {
  float s = 0;
  for (int i = 0; i < L; i++) s += v[i];
  return s;
}
static inline float halved(vec v) { /* the same by halves: other bits, closer and sooner */
  float x[L];
  memcpy(x, &v, sizeof x);
  for (int w = L / 2; w; w /= 2)
    for (int i = 0; i < w; i++) x[i] += x[i + w];
  return x[0];
}
static inline vec vmax(vec a, vec b) { return (vec)(((ivec)a & (a > b)) | ((ivec)b & ~(a > b))); }
static inline float highest(vec v) {
  float x[L];
  memcpy(x, &v, sizeof x);
  for (int w = L / 2; w; w /= 2) /* by halves: one after the other they would wait for each other */
    for (int i = 0; i < w; i++) x[i] = x[i + w] > x[i] ? x[i + w] : x[i];
  return x[0];
}

static inline vec vexp(vec x) { /* e^x for x <= 88 to about one unit in the last place; 0 below -87 */
  ivec alive = x > all(-87.0f);
  x = vmax(x, all(-87.0f));
  vec magic = all(12582912.0f), n = (x * 1.44269504f + magic) - magic;
  vec r = x - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  vec p = all(1.9875691e-4f);
  p = p * r + 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665795e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  ivec e = __builtin_convertvector(n, ivec);
  return (vec)(((ivec)p + (e << 23)) & alive);
}
static inline vec vtanh(vec x) {
  vec a = vmax(x, -x);
  vec t = 1.0f - 2.0f / (vexp(2.0f * vmax(-vmax(-a, all(-20.0f)), all(0))) + 1.0f);
  return (vec)((ivec)t | ((ivec)x & (ivec)all(-0.0f)));
}

static inline int thread(void) {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}
