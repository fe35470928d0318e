// The draw of a token from the largest logits of a row, as draw_best of runtime/engine/sampling/random_sampling.py (NumPy).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ort_api.h"

namespace carryall {
namespace {

constexpr int64_t kMaxSorted = 512, kNucleus = 64;  // as in random_sampling.py
constexpr double kRounding = 1e-4;

// The options of a request (sampling_state.py). An infinite top_k or top_p keeps all; min_p is above 0.
struct Options {
  double temperature, top_k, top_p, min_p;
  uint64_t key;  // of its stream of uniforms
};

bool keeps_all(const Options& options, int64_t vocab_size) {
  return options.top_k >= static_cast<double>(vocab_size) && std::isinf(options.top_p) &&
         options.min_p <= std::numeric_limits<double>::denorm_min();
}

// The largest logits of a row, in descending order, and the log-sum-exp of all; an upper bound of it if not exact.
struct Best {
  const float* logits;
  int64_t count, vocab_size;
  double logsumexp;
  bool exact;
};

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Number `place` of a stream, in [0, 1) (splitmix.py).
double uniform(uint64_t key, uint64_t place) {
  return static_cast<double>(mix(key + (place + 1) * 0x9E3779B97F4A7C15u) >> 11) * 0x1p-53;
}

// How many of the logits decide as a draw from the whole row does; 0 is none.
int64_t deciding(const Best& best, const Options& options) {
  if (options.top_k >= static_cast<double>(best.vocab_size)) {
    if (best.vocab_size <= best.count) return 0;
    if ((options.top_p < 1.0 && best.vocab_size > kMaxSorted) || keeps_all(options, best.vocab_size))
      return std::min(best.count, kNucleus);
  }
  return std::min(best.count, kMaxSorted);
}

class Draw {
 public:
  Draw(const Best& best, const Options& options) : best_(best), options_(options), width_(deciding(best, options)) {
    const double largest = best.logits[0];
    double sum = 0.0;
    for (int64_t i = 0; i < width_; i++) weights_[i] = std::exp((best.logits[i] - largest) / options.temperature);
    for (int64_t i = 0; i < width_; i++) {
      if (static_cast<double>(i) >= options.top_k) weights_[i] = 0.0;
      sums_[i] = sum += weights_[i];
    }
    known_ = sum;
  }

  // Returns the place of the token at a share of the kept weight; -1 where these logits do not decide.
  int64_t place(double share) const {
    if (width_ == 0) return -1;
    const double width = static_cast<double>(width_);
    if (options_.top_k <= width) return drawn(kept(known_), share);
    double least, most;
    bounds(&least, &most);
    if (keeps_all(options_, best_.vocab_size)) {
      const int64_t place = place_of(share * least);
      return place == place_of(share * most) && place < width_ ? place : -1;
    }
    const int64_t kept_at_least = kept(least), kept_at_most = kept(most);
    const bool whole = std::isinf(options_.top_p);
    const bool ends = options_.top_k < static_cast<double>(best_.vocab_size) || (!whole && known_ >= options_.top_p * most) ||
                      (whole && weights_[width_ - 1] < options_.min_p * (1.0 - kRounding));
    if (!ends || kept_at_most >= width_) return -1;
    const int64_t place = drawn(kept_at_least, share);
    return kept_at_least == kept_at_most || place == drawn(kept_at_most, share) ? place : -1;
  }

 private:
  // Bounds of the total weight of the logits that top-k keeps; see _totals of random_sampling.py.
  void bounds(double* least, double* most) const {
    const double largest = best_.logits[0], exponent = 1.0 / options_.temperature;
    const double others = static_cast<double>(best_.vocab_size - width_);
    const double smallest = std::max(std::exp(best_.logits[width_ - 1] - largest), 1e-300);
    double top = 0.0;
    for (int64_t i = 0; i < width_; i++) top += std::exp(best_.logits[i] - largest);
    const double total = std::exp(best_.logsumexp - largest), slope = std::pow(smallest, exponent - 1.0);
    const double rest_least = best_.exact ? std::max(0.0, total * (1.0 - kRounding) - top) : 0.0;
    const double rest_most = std::max(0.0, total * (1.0 + kRounding) - top);
    const double each = std::pow(smallest, exponent);
    *least = std::min(others * std::pow(rest_least / others, exponent), rest_least * slope);
    *most = std::min(std::max(others * std::pow(rest_most / others, exponent), rest_most * slope), others * each);
    if (options_.top_k < static_cast<double>(best_.vocab_size)) {
      *least = 0.0;
      *most = std::min(*most, (options_.top_k - static_cast<double>(width_)) * each);
    }
    *least = (known_ + *least) * (1.0 - kRounding);
    *most = (known_ + *most) * (1.0 + kRounding);
  }

  // How many of the first logits top-p, of a total weight, and min-p keep.
  int64_t kept(double total) const {
    const double nucleus = options_.top_p * total;
    int64_t count = 0;
    for (int64_t i = 0; i < width_; i++) count += sums_[i] - weights_[i] < nucleus && weights_[i] >= options_.min_p;
    return count;
  }

  int64_t drawn(int64_t kept, double share) const {
    const int64_t last = std::max<int64_t>(kept, 1) - 1;
    return std::min(place_of(share * sums_[last]), last);
  }

  // The place of the token at a cumulated weight; the width is behind the last.
  int64_t place_of(double target) const {
    int64_t count = 0;
    for (int64_t i = 0; i < width_; i++) count += sums_[i] <= target;
    return count;
  }

  Best best_;
  Options options_;
  int64_t width_;
  double known_;
  double weights_[kMaxSorted], sums_[kMaxSorted];
};

}  // namespace
}  // namespace carryall

// Writes the places [rows] of the tokens drawn, each from the next `counts` [rows] of `logits`; -1 where they do not decide. A
// token has number `numbers` [rows] of its request.
extern "C" CARRYALL_EXPORT void carryall_draw_best(const float* logits, const int64_t* counts, const double* logsumexps,
                                                   const char* exact, const carryall::Options* options, const int64_t* numbers,
                                                   int64_t rows, int64_t vocab_size, int64_t* places) {
  using namespace carryall;
  for (int64_t row = 0; row < rows; row++) {
    const Draw draw({logits, counts[row], vocab_size, logsumexps[row], exact[row] != 0}, options[row]);
    places[row] = draw.place(uniform(options[row].key, static_cast<uint64_t>(numbers[row])));
    logits += counts[row];
  }
}
