// Attention of packed sequences in bfloat16: sequences are not padded to rectangles, and probabilities are not kept;
// the backward pass recomputes them. Each head of a sequence is one task. Its result does not depend on which thread
// computes it. Sums are in float32. Called like kernels.cpp; the functions are absent on a CPU without the
// instructions.

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

#include <immintrin.h>

#include <algorithm>
#include <vector>

#include "elements.h"

namespace {

constexpr int64_t kLanes = 16;
constexpr int kMostRows = 6;
constexpr int kMostVectors = 4;
constexpr int64_t kTile = 48;

inline int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// `rows` x `vectors` * 16 sums of products of bfloat16 pairs. Each pair of `left` is multiplied by the pair in every
// lane of `right`; the lanes of one pair are adjacent in memory.
template <int kRows, int kVectors>
inline void multiply_pairs(const uint32_t *left, int64_t left_row, int64_t left_step, const uint32_t *right,
                           int64_t right_step, int64_t pairs, float *out, int64_t out_row, float scale, bool adds) {
    __m512 sums[kRows][kVectors];
    for (int row = 0; row < kRows; ++row) {
        for (int vector = 0; vector < kVectors; ++vector) sums[row][vector] = _mm512_setzero_ps();
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {
        __m512i lanes[kVectors];
        for (int vector = 0; vector < kVectors; ++vector) {
            lanes[vector] = _mm512_loadu_si512(right + pair * right_step + vector * kLanes);
        }
        for (int row = 0; row < kRows; ++row) {
            const __m512i one = _mm512_set1_epi32(static_cast<int>(left[row * left_row + pair * left_step]));
            for (int vector = 0; vector < kVectors; ++vector) {
                sums[row][vector] = _mm512_dpbf16_ps(sums[row][vector], (__m512bh)one, (__m512bh)lanes[vector]);
            }
        }
    }
    const __m512 factor = _mm512_set1_ps(scale);
    for (int row = 0; row < kRows; ++row) {
        for (int vector = 0; vector < kVectors; ++vector) {
            float *own = out + row * out_row + vector * kLanes;
            const __m512 before = adds ? _mm512_loadu_ps(own) : _mm512_setzero_ps();
            _mm512_storeu_ps(own, _mm512_fmadd_ps(sums[row][vector], factor, before));
        }
    }
}

template <int kRows>
inline void multiply_rows(const uint32_t *left, int64_t left_row, int64_t left_step, const uint32_t *right,
                          int64_t right_step, int64_t pairs, float *out, int64_t out_row, int64_t vectors, float scale,
                          bool adds) {
    for (int64_t done = 0; done < vectors; done += kMostVectors) {
        const uint32_t *own = right + done * kLanes;
        float *result = out + done * kLanes;
        const int64_t here = std::min<int64_t>(kMostVectors, vectors - done);
#define BERTKIT_VECTORS(COUNT)                                                                                        \
    multiply_pairs<kRows, COUNT>(left, left_row, left_step, own, right_step, pairs, result, out_row, scale, adds)
        if (here == 1) BERTKIT_VECTORS(1);
        else if (here == 2) BERTKIT_VECTORS(2);
        else if (here == 3) BERTKIT_VECTORS(3);
        else BERTKIT_VECTORS(4);
#undef BERTKIT_VECTORS
    }
}

// out (rows x vectors * 16) = scale * left * right, added to the previous contents if `adds`.
inline void multiply(const uint32_t *left, int64_t left_row, int64_t left_step, const uint32_t *right,
                     int64_t right_step, int64_t pairs, float *out, int64_t out_row, int64_t rows, int64_t vectors,
                     float scale, bool adds) {
    for (int64_t done = 0; done < rows; done += kMostRows) {
        const uint32_t *own = left + done * left_row;
        float *result = out + done * out_row;
        const int64_t here = std::min<int64_t>(kMostRows, rows - done);
#define BERTKIT_ROWS(COUNT)                                                                                           \
    multiply_rows<COUNT>(own, left_row, left_step, right, right_step, pairs, result, out_row, vectors, scale, adds)
        if (here == 1) BERTKIT_ROWS(1);
        else if (here == 2) BERTKIT_ROWS(2);
        else if (here == 3) BERTKIT_ROWS(3);
        else if (here == 4) BERTKIT_ROWS(4);
        else if (here == 5) BERTKIT_ROWS(5);
        else BERTKIT_ROWS(6);
#undef BERTKIT_ROWS
    }
}

// Consecutive rows as pairs: out[pair][column] contains rows 2 * pair and 2 * pair + 1; a missing row is 0.
inline void interleave(const BFloat16 *rows, int64_t stride, int64_t count, int64_t width, uint32_t *out,
                       int64_t out_row) {
    for (int64_t pair = 0; 2 * pair < count; ++pair) {
        const BFloat16 *first = rows + 2 * pair * stride;
        const bool has_second = 2 * pair + 1 < count;
        uint32_t *own = out + pair * out_row;
        for (int64_t column = 0; column < width; column += kLanes) {
            __m512i both = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(first + column)));
            if (has_second) {
                const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(first + stride + column));
                both = _mm512_or_si512(both, _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
            }
            _mm512_storeu_si512(own + column, both);
        }
    }
}

// Transposes sixteen rows of sixteen pairs: afterwards `rows[i]` has pair i of every row.
inline void transpose(__m512i (&rows)[kLanes]) {
    __m512i twos[kLanes], fours[kLanes];
    for (int i = 0; i < kLanes; i += 2) {
        twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < kLanes; i += 4) {  // fours[i + k]: pair 4 * l + k of rows i to i + 3, in quarter l
        fours[i] = _mm512_unpacklo_epi64(twos[i], twos[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(twos[i], twos[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(twos[i + 1], twos[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(twos[i + 1], twos[i + 3]);
    }
    constexpr int kEven = 0x88, kOdd = 0xdd;  // quarters 0 and 2, or 1 and 3, of both operands
    for (int k = 0; k < 4; ++k) {
        const __m512i even_first = _mm512_shuffle_i32x4(fours[k], fours[4 + k], kEven);
        const __m512i even_last = _mm512_shuffle_i32x4(fours[8 + k], fours[12 + k], kEven);
        const __m512i odd_first = _mm512_shuffle_i32x4(fours[k], fours[4 + k], kOdd);
        const __m512i odd_last = _mm512_shuffle_i32x4(fours[8 + k], fours[12 + k], kOdd);
        rows[k] = _mm512_shuffle_i32x4(even_first, even_last, kEven);
        rows[4 + k] = _mm512_shuffle_i32x4(odd_first, odd_last, kEven);
        rows[8 + k] = _mm512_shuffle_i32x4(even_first, even_last, kOdd);
        rows[12 + k] = _mm512_shuffle_i32x4(odd_first, odd_last, kOdd);
    }
}

// Pairs of columns, transposed: out[pair][row], 0 after the last row.
inline void transpose_pairs(const BFloat16 *rows, int64_t stride, int64_t count, int64_t width, uint32_t *out,
                            int64_t out_row) {
    for (int64_t row = 0; row < out_row; row += kLanes) {
        for (int64_t pair = 0; pair < width / 2; pair += kLanes) {
            const int64_t pairs = std::min(kLanes, width / 2 - pair);
            const __mmask16 there = static_cast<__mmask16>((1u << pairs) - 1u);
            __m512i block[kLanes];
            for (int64_t i = 0; i < kLanes; ++i) {
                block[i] = row + i < count ? _mm512_maskz_loadu_epi32(there, rows + (row + i) * stride + 2 * pair)
                                           : _mm512_setzero_si512();
            }
            transpose(block);
            for (int64_t i = 0; i < pairs; ++i) _mm512_storeu_si512(out + (pair + i) * out_row + row, block[i]);
        }
    }
}

inline void narrow_rows(const float *rows, int64_t row, int64_t count, int64_t width, BFloat16 *out, int64_t out_row) {
    for (int64_t i = 0; i < count; ++i) {
#pragma omp simd
        for (int64_t column = 0; column < width; ++column) narrow(rows[i * row + column], out[i * out_row + column]);
    }
}

// Softmax of the scores from `low` to `high`, then dropout; the scores are overwritten by their exponentials.
inline void softmax_range(float *scores, int64_t low, int64_t high, const int16_t *random, int64_t threshold,
                          float keep_scale, BFloat16 *out, float &log_sum) {
    const float top = largest(scores + low, high - low);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = low; i < high; ++i) {
        scores[i] = fast_exp(scores[i] - top);
        sum += scores[i];
    }
    log_sum = top + std::log(sum);
    if (random == nullptr) {
        const float factor = 1.0f / sum;
#pragma omp simd
        for (int64_t i = low; i < high; ++i) narrow(factor * scores[i], out[i]);
        return;
    }
    const float factor = keep_scale / sum;
#pragma omp simd
    for (int64_t i = low; i < high; ++i) {
        narrow(random[i] >= threshold ? factor * scores[i] : 0.0f, out[i]);
    }
}

// From the scores and the gradient of the probabilities after dropout, computes these probabilities (`shares`) and the
// gradient of the scores (`slopes`); both are 0 outside `low` to `high`.
inline void softmax_range_backward(float *scores, const float *gradient, int64_t low, int64_t high, int64_t padded,
                                   const int16_t *random, int64_t threshold, float keep_scale, float log_sum,
                                   BFloat16 *shares, BFloat16 *slopes) {
    std::memset(shares, 0, static_cast<size_t>(padded) * sizeof *shares);
    std::memset(slopes, 0, static_cast<size_t>(padded) * sizeof *slopes);
    float dot = 0.0f;
    if (random == nullptr) {
#pragma omp simd reduction(+ : dot)
        for (int64_t i = low; i < high; ++i) {
            const float share = fast_exp(scores[i] - log_sum);
            scores[i] = share;
            dot += share * gradient[i];
            narrow(share, shares[i]);
        }
#pragma omp simd
        for (int64_t i = low; i < high; ++i) narrow(scores[i] * (gradient[i] - dot), slopes[i]);
        return;
    }
#pragma omp simd reduction(+ : dot)
    for (int64_t i = low; i < high; ++i) {
        const float share = fast_exp(scores[i] - log_sum);
        const float kept = random[i] >= threshold ? keep_scale * share : 0.0f;
        scores[i] = share;
        dot += kept * gradient[i];
        narrow(kept, shares[i]);
    }
#pragma omp simd
    for (int64_t i = low; i < high; ++i) {
        const float kept = random[i] >= threshold ? keep_scale * gradient[i] : 0.0f;
        narrow(scores[i] * (kept - dot), slopes[i]);
    }
}

// Arguments shared by all heads of a batch.
struct Attention {
    const int32_t *bounds;       // of the sequences, among the packed tokens
    const uint8_t *causal;       // for each sequence, whether its attention is causal; null: it is causal in none
    const int64_t *random_start; // for each sequence, where its random bits begin; null: no dropout
    const int16_t *random;
    int64_t sequences, heads, width;
    bool one_query;      // whether each sequence has one query, which attends to all its tokens; else all are queries
    int64_t left, right; // tokens of the window on either side; -1: all
    int64_t threshold;
    float keep_scale, scale;

    int64_t first_query(int64_t sequence) const { return one_query ? sequence : bounds[sequence]; }
    int64_t queries(int64_t sequence) const { return one_query ? 1 : length(sequence); }
    int64_t length(int64_t sequence) const { return bounds[sequence + 1] - bounds[sequence]; }
    int64_t longest() const {
        int64_t found = 0;
        for (int64_t sequence = 0; sequence < sequences; ++sequence) found = std::max(found, length(sequence));
        return found;
    }
    // The keys that a query attends to.
    int64_t first_key(int64_t query) const { return left < 0 ? 0 : std::max<int64_t>(0, query - left); }
    int64_t last_key(int64_t sequence, int64_t query) const {
        const int64_t end = length(sequence);
        const int64_t behind = causal != nullptr && causal[sequence] ? 0 : right;
        return behind < 0 ? end : std::min(end, query + behind + 1);
    }
    const int16_t *random_of(int64_t sequence, int64_t head, int64_t query) const {
        if (random_start == nullptr) return nullptr;
        return random + random_start[sequence] + (head * queries(sequence) + query) * length(sequence);
    }
};

void attention(const BFloat16 *query, int64_t query_row, const BFloat16 *key, int64_t key_row, const BFloat16 *value,
               int64_t value_row, const Attention &all, BFloat16 *out, float *log_sum, int threads) {
    const int64_t width = all.width, vectors = width / kLanes, out_row = all.heads * width;
    const int64_t most = up_to(all.longest(), kLanes);
#pragma omp parallel num_threads(threads)
    {
        std::vector<uint32_t> keys(static_cast<size_t>(width / 2 * most)), values(static_cast<size_t>(most * width));
        std::vector<float> scores(static_cast<size_t>(kMostRows * most)), mixed(static_cast<size_t>(kMostRows * width));
        std::vector<BFloat16> shares(static_cast<size_t>(kMostRows * most));
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < all.sequences * all.heads; ++task) {
            const int64_t sequence = task / all.heads, head = task % all.heads, start = all.bounds[sequence];
            const int64_t length = all.length(sequence), padded = up_to(length, kLanes);
            const int64_t asked = all.first_query(sequence), queries = all.queries(sequence);
            transpose_pairs(key + start * key_row + head * width, key_row, length, width, keys.data(), padded);
            interleave(value + start * value_row + head * width, value_row, length, width, values.data(), width);
            for (int64_t first = 0; first < queries; first += kMostRows) {
                const int64_t rows = std::min<int64_t>(kMostRows, queries - first);
                const BFloat16 *own = query + (asked + first) * query_row + head * width;
                multiply(reinterpret_cast<const uint32_t *>(own), query_row / 2, 1, keys.data(), padded, width / 2,
                         scores.data(), padded, rows, padded / kLanes, all.scale, false);
                for (int64_t row = 0; row < rows; ++row) {
                    const int64_t low = all.first_key(first + row), high = all.last_key(sequence, first + row);
                    float *score = scores.data() + row * padded;
                    BFloat16 *share = shares.data() + row * padded;
                    const int16_t *random = all.random_of(sequence, head, first + row);
                    std::memset(share, 0, static_cast<size_t>(padded) * sizeof *share);
                    softmax_range(score, low, high, random, all.threshold, all.keep_scale, share,
                                  log_sum[(asked + first + row) * all.heads + head]);
                }
                multiply(reinterpret_cast<const uint32_t *>(shares.data()), padded / 2, 1, values.data(), width,
                         (length + 1) / 2, mixed.data(), width, rows, vectors, 1.0f, false);
                narrow_rows(mixed.data(), width, rows, width, out + (asked + first) * out_row + head * width, out_row);
            }
        }
    }
}

void attention_backward(const BFloat16 *query, int64_t query_row, const BFloat16 *key, int64_t key_row,
                        const BFloat16 *value, int64_t value_row, const BFloat16 *given, const float *log_sum,
                        const Attention &all, BFloat16 *query_gradient, BFloat16 *key_gradient,
                        BFloat16 *value_gradient, int64_t gradient_row, int threads) {
    const int64_t width = all.width, vectors = width / kLanes, out_row = all.heads * width;
    const int64_t most = up_to(all.longest(), kLanes);
#pragma omp parallel num_threads(threads)
    {
        const auto size = [](int64_t rows, int64_t columns) { return static_cast<size_t>(rows * columns); };
        std::vector<uint32_t> keys(size(width / 2, most)), values(size(width / 2, most)), key_pairs(size(most, width));
        std::vector<uint32_t> share_pairs(size(kTile / 2, most)), slope_pairs(size(kTile / 2, most));
        std::vector<uint32_t> query_pairs(size(kTile / 2, width)), given_pairs(size(kTile / 2, width));
        std::vector<float> scores(size(kMostRows, most)), slopes_of_shares(size(kMostRows, most));
        std::vector<float> mixed(size(kMostRows, width)), key_sum(size(most, width)), value_sum(size(most, width));
        std::vector<BFloat16> shares(size(kTile, most)), slopes(size(kTile, most));
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < all.sequences * all.heads; ++task) {
            const int64_t sequence = task / all.heads, head = task % all.heads, start = all.bounds[sequence];
            const int64_t length = all.length(sequence), padded = up_to(length, kLanes);
            const int64_t asked = all.first_query(sequence), queries = all.queries(sequence);
            const int64_t out = asked * out_row + head * width;
            BFloat16 *own_query_gradient = query_gradient + asked * gradient_row + head * width;
            const BFloat16 *own_query = query + asked * query_row + head * width;
            const BFloat16 *own_key = key + start * key_row + head * width;
            transpose_pairs(own_key, key_row, length, width, keys.data(), padded);
            transpose_pairs(value + start * value_row + head * width, value_row, length, width, values.data(), padded);
            interleave(own_key, key_row, length, width, key_pairs.data(), width);
            for (int64_t tile = 0; tile < queries; tile += kTile) {
                const int64_t tile_rows = std::min(kTile, queries - tile), pairs = (tile_rows + 1) / 2;
                for (int64_t first = tile; first < tile + tile_rows; first += kMostRows) {
                    const int64_t rows = std::min<int64_t>(kMostRows, tile + tile_rows - first);
                    const BFloat16 *gradient = given + out + first * out_row;
                    multiply(reinterpret_cast<const uint32_t *>(own_query + first * query_row), query_row / 2, 1,
                             keys.data(), padded, width / 2, scores.data(), padded, rows, padded / kLanes, all.scale,
                             false);
                    multiply(reinterpret_cast<const uint32_t *>(gradient), out_row / 2, 1, values.data(), padded,
                             width / 2, slopes_of_shares.data(), padded, rows, padded / kLanes, 1.0f, false);
                    for (int64_t row = 0; row < rows; ++row) {
                        const int64_t at = (first - tile + row) * padded;
                        softmax_range_backward(
                            scores.data() + row * padded, slopes_of_shares.data() + row * padded,
                            all.first_key(first + row), all.last_key(sequence, first + row), padded,
                            all.random_of(sequence, head, first + row), all.threshold, all.keep_scale,
                            log_sum[(asked + first + row) * all.heads + head], shares.data() + at, slopes.data() + at);
                    }
                    multiply(reinterpret_cast<const uint32_t *>(slopes.data() + (first - tile) * padded), padded / 2, 1,
                             key_pairs.data(), width, (length + 1) / 2, mixed.data(), width, rows, vectors, all.scale,
                             false);
                    narrow_rows(mixed.data(), width, rows, width, own_query_gradient + first * gradient_row, gradient_row);
                }
                interleave(shares.data(), padded, tile_rows, padded, share_pairs.data(), padded);
                interleave(slopes.data(), padded, tile_rows, padded, slope_pairs.data(), padded);
                interleave(own_query + tile * query_row, query_row, tile_rows, width, query_pairs.data(), width);
                interleave(given + out + tile * out_row, out_row, tile_rows, width, given_pairs.data(), width);
                multiply(share_pairs.data(), 1, padded, given_pairs.data(), width, pairs, value_sum.data(), width,
                         length, vectors, 1.0f, tile > 0);
                multiply(slope_pairs.data(), 1, padded, query_pairs.data(), width, pairs, key_sum.data(), width,
                         length, vectors, all.scale, tile > 0);
            }
            const int64_t own_keys = start * gradient_row + head * width;
            narrow_rows(key_sum.data(), width, length, width, key_gradient + own_keys, gradient_row);
            narrow_rows(value_sum.data(), width, length, width, value_gradient + own_keys, gradient_row);
        }
    }
}

}  // namespace

extern "C" void attention_bfloat16(const BFloat16 *query, int64_t query_row, const BFloat16 *key, int64_t key_row,
                                   const BFloat16 *value, int64_t value_row, const int32_t *bounds,
                                   const uint8_t *causal, const int64_t *random_start, const int16_t *random,
                                   int64_t sequences, int64_t heads, int64_t width, int one_query, int64_t left,
                                   int64_t right, int64_t threshold, float keep_scale, float scale, BFloat16 *out,
                                   float *log_sum, int threads) {
    const Attention all{bounds, causal, random_start, random, sequences, heads, width, one_query != 0,
                        left, right, threshold, keep_scale, scale};
    attention(query, query_row, key, key_row, value, value_row, all, out, log_sum, threads);
}

extern "C" void attention_backward_bfloat16(const BFloat16 *query, int64_t query_row, const BFloat16 *key,
                                            int64_t key_row, const BFloat16 *value, int64_t value_row,
                                            const int32_t *bounds, const uint8_t *causal, const int64_t *random_start,
                                            const int16_t *random, int64_t sequences, int64_t heads, int64_t width,
                                            int one_query, int64_t left, int64_t right, int64_t threshold,
                                            float keep_scale, float scale, const BFloat16 *given, const float *log_sum,
                                            BFloat16 *query_gradient, BFloat16 *key_gradient, BFloat16 *value_gradient,
                                            int64_t gradient_row, int threads) {
    const Attention all{bounds, causal, random_start, random, sequences, heads, width, one_query != 0,
                        left, right, threshold, keep_scale, scale};
    attention_backward(query, query_row, key, key_row, value, value_row, given, log_sum, all, query_gradient,
                       key_gradient, value_gradient, gradient_row, threads);
}
#endif
