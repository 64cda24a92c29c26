/* RMSNorm of rows of d numbers, whole vectors, forward and backward: y = w x r with r = 1 / sqrt(mean x² + eps).

   Threads share out blocks of rows, and the blocks' sums for the weight's gradient are added in their order: any number
   of threads gives the same bits. */
#include "vectors.h"
#define ROWS 256 /* of a block */

void norm_forward(int64_t rows, int64_t d, int64_t threads, float eps, const float *x, const float *w, float *r, float *y) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * d > WORTH / 16)
  for (int64_t t = 0; t < rows; t++) {
    const float *row = x + t * d;
    vec sum = {};
    for (int64_t i = 0; i < d; i += L) sum += load(row + i) * load(row + i);
    r[t] = 1 / sqrtf(halved(sum) / d + eps);
    for (int64_t i = 0; i < d; i += L) store(y + t * d + i, load(row + i) * r[t] * load(w + i));
  }
}

/* From the gradient g of y those of x and, with one row of dw for each block and zeros in them, of w. */
void norm_backward(int64_t rows, int64_t d, int64_t threads, const float *x, const float *w, const float *r, const float *g,
                   float *dx, float *dw) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * d > WORTH / 16)
  for (int64_t b = 0; b < rows; b += ROWS)
    for (int64_t t = b; t < rows && t < b + ROWS; t++) {
      const float *row = x + t * d, *grad = g + t * d;
      float *own = dw + b / ROWS * d;
      vec sum = {};
      for (int64_t i = 0; i < d; i += L) {
        vec part = load(row + i) * r[t] * load(grad + i);
        sum += part * load(w + i);
        store(own + i, load(own + i) + part);
      }
      float mean = halved(sum) / d;
      for (int64_t i = 0; i < d; i += L)
        store(dx + t * d + i, (load(grad + i) * load(w + i) - load(row + i) * r[t] * mean) * r[t]);
    }
  for (int64_t b = ROWS; b < rows; b += ROWS)
    for (int64_t i = 0; i < d; i++) dw[i] += dw[b / ROWS * d + i];
}
