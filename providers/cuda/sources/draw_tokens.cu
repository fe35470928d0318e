// DrawTokens: the largest logits of a row in order, the log-sum-exp of all, and a token drawn from the largest.
//
// In place of the graph of TopLogitsPass and DrawTokensPass, 37 launches. A block of 512 threads computes a row:
//
// 1. Each thread keeps the largest of its logits. The k-th largest of these 512 is a bound: k logits are not below it.
// 2. All logits that are not below it, rarely more than k, are gathered and sorted. If they are too many, which takes
//    logits whose largest lie 512 apart, a higher bound is found by bisection.
// 3. One thread draws among the k.
//
// Logits are compared as integers: the order of floats in the upper half, tokens in reverse order in the lower half, so
// that no two are equal, and of equal logits the lowest token comes first, as in the standard's TopK.

typedef unsigned long long Key;

constexpr int kThreads = 512, kRoom = 1024, kMost = 256;  // kMost: results, see cuda_operators.cpp
constexpr int kControls = 5;                              // 1 / temperature, top_k, top_p, min_p, uniform

__device__ inline Key key_of(float logit, int token) {
  const unsigned bits = __float_as_uint(logit + 0.0f);  // -0 is 0
  const unsigned order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(order) << 32 | (0xffffffffu - static_cast<unsigned>(token));
}

__device__ inline float logit_of(Key key) {
  const unsigned order = static_cast<unsigned>(key >> 32);
  return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}

__device__ inline int token_of(Key key) { return static_cast<int>(0xffffffffu - static_cast<unsigned>(key)); }

// Sorts keys in descending order; `count` is a power of two (bitonic sort: K. Batcher, 1968).
__device__ void sort(Key* keys, int count) {
  for (int size = 2; size <= count; size *= 2)
    for (int gap = size / 2; gap > 0; gap /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < count / 2; i += kThreads) {
        const int low = i / gap * gap * 2 + i % gap, high = low + gap;
        const bool falls = (low & size) == 0;
        const Key first = keys[low], second = keys[high];
        if (first < second ? falls : !falls) {
          keys[low] = second;
          keys[high] = first;
        }
      }
    }
  __syncthreads();
}

// Gathers the keys that are not below a bound, as many as there is room for; returns their number.
__device__ int gather(const float* logits, int size, Key bound, Key* keys, int* counter) {
  __syncthreads();
  if (threadIdx.x == 0) *counter = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const Key key = key_of(logits[i], i);
    if (key < bound) continue;
    const int place = atomicAdd(counter, 1);
    if (place < kRoom) keys[place] = key;
  }
  __syncthreads();
  return *counter;
}

__device__ float sum(float value, float* parts) {
  __syncthreads();
  parts[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  __syncthreads();
  return parts[0];
}

// Draws one of `count` candidates whose weights fall, see draw_tokens.py; `whole` is the weight of all tokens.
__device__ int draw(const float* weights, int count, const float* controls, float whole) {
  const float top_k = controls[1], top_p = controls[2], min_p = controls[3], uniform = controls[4];
  float total = whole;
  if (top_k <= static_cast<float>(count)) {
    total = 0.0f;
    for (int i = 0; i < count && static_cast<float>(i) < top_k; i++) total += weights[i];
  }
  float before = 0.0f, kept = 0.0f;
  int last = 0;  // candidates in front of it are kept: weights fall, so what is left out is behind
  for (; last < count && static_cast<float>(last) < top_k && before < top_p * total && !(weights[last] < min_p); last++) {
    before += weights[last];
    kept += weights[last];
  }
  const float target = uniform * (last == count ? total : kept);  // all of them are kept: so are those behind
  float mass = 0.0f;
  for (int i = 0; i < last; i++) {
    mass += weights[i];
    if (mass > target) return i;
  }
  return last > 0 ? last - 1 : 0;
}

// logits [rows, size], controls [rows, 5] or null -> values and tokens [rows, count], totals and drawn [rows].
extern "C" __global__ void draw_tokens(const float* logits, const float* controls, int size, int count, float* values,
                                       long long* tokens, float* totals, long long* drawn) {
  __shared__ Key keys[kRoom];
  __shared__ float parts[kThreads];
  __shared__ float weights[kMost];
  __shared__ int counter;
  const long long row = blockIdx.x;
  logits += row * size;

  Key largest = 0;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const Key key = key_of(logits[i], i);
    if (key > largest) largest = key;
  }
  keys[threadIdx.x] = largest;
  sort(keys, kThreads);
  Key low = keys[count - 1], high = keys[0];
  const float most = logit_of(high);
  int gathered = gather(logits, size, low, keys, &counter);
  while (gathered > kRoom || gathered < count) {  // the first bound gives no fewer; one between may
    const Key middle = low + (high - low) / 2;
    gathered = gather(logits, size, middle, keys, &counter);
    if (gathered < count)
      high = middle;
    else
      low = middle;
  }
  for (int i = gathered + threadIdx.x; i < kRoom; i += kThreads) keys[i] = 0;
  sort(keys, kRoom);

  const float inverse = controls == nullptr ? 1.0f : controls[row * kControls];
  float mass = 0.0f, whole = 0.0f;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const float below = logits[i] - most;
    mass += expf(below);
    if (inverse != 1.0f) whole += expf(below * inverse);
  }
  mass = sum(mass, parts);
  whole = inverse == 1.0f ? mass : sum(whole, parts);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float value = logit_of(keys[i]);
    values[row * count + i] = value;
    tokens[row * count + i] = token_of(keys[i]);
    weights[i] = expf((value - most) * inverse);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  totals[row] = logf(mass) + most;
  if (controls != nullptr) drawn[row] = token_of(keys[draw(weights, count, controls + row * kControls, whole)]);
}
