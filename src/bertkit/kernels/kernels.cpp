// Loops over rows of float32 or bfloat16, each of which replaces several passes of torch's operators over memory.
//
// Plain C functions over pointers, called through ctypes (loading.py), so that no header of torch is needed and building
// takes seconds. Arithmetic is in float32, whatever the type in memory. A row is computed by one thread in an order that
// does not depend on the number of threads, and sums over rows are formed in a fixed number of parts: the same bits with
// any number of threads. What is not finite stays so.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

struct BFloat16 {
    uint16_t bits;
};

inline float bits_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t float_as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) { return bits_as_float(static_cast<uint32_t>(value.bits) << 16); }

inline void narrow(float value, float &out) { out = value; }

// To the nearest, of two equally near ones to the even one, as torch rounds. The NaNs of arithmetic stay NaNs.
inline void narrow(float value, BFloat16 &out) {
    const uint32_t bits = float_as_bits(value);
    out.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// 2^x for x between -126 and 127: a power of two times a polynomial over half a binade on either side of zero, fitted
// by least squares of the relative error at Chebyshev nodes: to 8e-8.
inline float power_of_two(float x) {
    const float whole = std::nearbyint(x);
    const float rest = x - whole;
    float poly = 1.32669706e-3f;
    poly = poly * rest + 9.67545994e-3f;
    poly = poly * rest + 5.55074252e-2f;
    poly = poly * rest + 2.40221217e-1f;
    poly = poly * rest + 6.93146944e-1f;
    poly = poly * rest + 1.00000012f;
    return poly * bits_as_float(static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23);
}

constexpr float kLog2OfE = 1.44269504088896341f;

// exp(x) for x of at most 88; below -87 that of -87.
inline float fast_exp(float x) {
    x = x * kLog2OfE;
    return power_of_two(x < -125.5f ? -125.5f : x);
}

constexpr float kRootTwoOverPi = 0.7978845608028654f;
constexpr float kCubic = 0.044715f;
constexpr float kRootHalf = 0.7071067811865476f;
constexpr float kInverseRootTwoPi = 0.3989422804014327f;

// From the exponential of a number that is not positive, which cannot overflow.
inline float tanh_by_exp(float x) {
    const float decay = fast_exp(-2.0f * std::fabs(x));
    return std::copysign((1.0f - decay) / (1.0f + decay), x);
}

// The normal distribution function; Abramowitz and Stegun 1964, 7.1.26: to 1.5e-7.
inline float normal_cdf(float x, float density_at_x) {
    const float z = std::fabs(x) * kRootHalf;
    const float t = 1.0f / (1.0f + 0.3275911f * z);
    float poly = 1.061405429f;
    poly = poly * t - 1.453152027f;
    poly = poly * t + 1.421413741f;
    poly = poly * t - 0.284496736f;
    poly = poly * t + 0.254829592f;
    // exp(-z^2) is the density without its factor.
    const float tail = 0.5f * poly * t * density_at_x;
    return x < 0.0f ? tail : 1.0f - tail;
}

// Both forms of GELU. Of the exact one torch's own forward pass is as fast.
struct GeluByTanh {
    static float value(float x) {
        return 0.5f * x * (1.0f + tanh_by_exp(kRootTwoOverPi * (x + kCubic * x * x * x)));
    }
    static float slope(float x) {
        const float inner = kRootTwoOverPi * (x + kCubic * x * x * x);
        const float t = tanh_by_exp(inner);
        return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kRootTwoOverPi * (1.0f + 3.0f * kCubic * x * x);
    }
};

struct GeluExact {
    static float slope(float x) {
        const float density = fast_exp(-0.5f * x * x);
        return normal_cdf(x, density) + x * density * kInverseRootTwoPi;
    }
};

constexpr int64_t kChunk = 4096;

template <class Form, class T>
void activation(const T *x, T *y, int64_t count, int threads) {
    const int64_t chunks = (count + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t end = std::min(count, (chunk + 1) * kChunk);
#pragma omp simd
        for (int64_t i = chunk * kChunk; i < end; ++i) narrow(Form::value(widen(x[i])), y[i]);
    }
}

template <class Form, class T>
void activation_backward(const T *x, const T *gradient, T *out, int64_t count, int threads) {
    const int64_t chunks = (count + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t end = std::min(count, (chunk + 1) * kChunk);
#pragma omp simd
        for (int64_t i = chunk * kChunk; i < end; ++i) narrow(widen(gradient[i]) * Form::slope(widen(x[i])), out[i]);
    }
}

template <class T>
float largest(const T *row, int64_t count) {
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; ++i) {
        const float value = widen(row[i]);
        top = value > top ? value : top;
    }
    return top;
}

template <class T>
void cross_entropy(T *logits, int64_t rows, int64_t words, const int64_t *label, const float *weight, float z_loss,
                   float smoothing, bool learning, double *loss, uint8_t *correct, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        T *own = logits + row * words;
        const int64_t word = label[row];
        const float top = largest(own, words);
        const float label_logit = widen(own[word]);
        bool first = label_logit == top;
        for (int64_t i = 0; first && i < word; ++i) first = widen(own[i]) != top;
        correct[row] = first;
        float sum = 0.0f, sum_logits = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < words; ++i) sum += fast_exp(widen(own[i]) - top);
        if (smoothing != 0.0f) {
#pragma omp simd reduction(+ : sum_logits)
            for (int64_t i = 0; i < words; ++i) sum_logits += widen(own[i]);
        }
        const float log_sum = top + std::log(sum);
        const float factor = weight == nullptr ? 1.0f : weight[row];
        const float mean = sum_logits / static_cast<float>(words);
        const float aim = (1.0f - smoothing) * label_logit + smoothing * mean;
        loss[row] = static_cast<double>(factor * (log_sum - aim) + z_loss * log_sum * log_sum);
        if (!learning) continue;
        const float scale = (factor + 2.0f * z_loss * log_sum) / sum;
        const float even = factor * smoothing / static_cast<float>(words);
        const float at_label = scale * fast_exp(label_logit - top) - even - (1.0f - smoothing) * factor;
#pragma omp simd
        for (int64_t i = 0; i < words; ++i) narrow(scale * fast_exp(widen(own[i]) - top) - even, own[i]);
        narrow(at_label, own[word]);
    }
}

// Softmax of rows of scores over the first keys of a row, `visible` many of them for each `rows_each` rows, and dropout
// of the probabilities: what is below `threshold` in the random bits is dropped. `log_sum` is for the backward pass.
template <bool kDrops, class T>
void softmax_dropout_row(const T *scores, int64_t seen, int64_t keys, const int16_t *random, int threshold, float scale,
                         T *out, float &log_sum) {
    const float top = largest(scores, seen);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < seen; ++i) sum += fast_exp(widen(scores[i]) - top);
    log_sum = top + std::log(sum);
    const float factor = scale / sum;
#pragma omp simd
    for (int64_t i = 0; i < seen; ++i) {
        const float value = factor * fast_exp(widen(scores[i]) - top);
        narrow(!kDrops || random[i] >= threshold ? value : 0.0f, out[i]);
    }
    for (int64_t i = seen; i < keys; ++i) narrow(0.0f, out[i]);
}

template <class T>
void softmax_dropout(const T *scores, const int64_t *visible, int64_t rows_each, int64_t rows, int64_t keys,
                     const int16_t *random, int threshold, float scale, T *out, float *log_sum, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = row * keys, seen = visible == nullptr ? keys : visible[row / rows_each];
        if (random == nullptr) {
            softmax_dropout_row<false>(scores + at, seen, keys, random, threshold, scale, out + at, log_sum[row]);
        } else {
            softmax_dropout_row<true>(scores + at, seen, keys, random + at, threshold, scale, out + at, log_sum[row]);
        }
    }
}

// A probability that was dropped is one whose output is zero: where it is zero by itself its gradient is, too.
template <class T>
void softmax_dropout_backward(const T *scores, const T *out, const float *log_sum, const T *gradient,
                              const int64_t *visible, int64_t rows_each, int64_t rows, int64_t keys, float scale,
                              T *result, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = row * keys, seen = visible == nullptr ? keys : visible[row / rows_each];
        const T *own = scores + at, *outs = out + at, *given = gradient + at;
        T *results = result + at;
        const float shift = log_sum[row];
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < seen; ++i) dot += widen(outs[i]) * widen(given[i]);
#pragma omp simd
        for (int64_t i = 0; i < seen; ++i) {
            const float kept = widen(outs[i]) != 0.0f ? scale * widen(given[i]) : 0.0f;
            narrow(fast_exp(widen(own[i]) - shift) * (kept - dot), results[i]);
        }
        for (int64_t i = seen; i < keys; ++i) narrow(0.0f, results[i]);
    }
}

// norm(residual + dropout(branch)): `sum` is what the norm reads, kept for the backward pass with its mean and inverse
// deviation.
template <bool kDrops, class T>
void residual_norm(const float *residual, const T *branch, const int16_t *random, int64_t threshold, float scale,
                   const float *weight, const float *bias, float epsilon, int64_t rows, int64_t width, float *sum,
                   float *mean, float *inverse, float *out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = row * width;
        float total = 0.0f;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < width; ++i) {
            const bool keeps = !kDrops || random[at + i] >= threshold;
            const float value = residual[at + i] + (keeps ? scale * widen(branch[at + i]) : 0.0f);
            sum[at + i] = value;
            total += value;
        }
        const float centre = total / static_cast<float>(width);
        float square = 0.0f;
#pragma omp simd reduction(+ : square)
        for (int64_t i = 0; i < width; ++i) square += (sum[at + i] - centre) * (sum[at + i] - centre);
        const float rate = 1.0f / std::sqrt(square / static_cast<float>(width) + epsilon);
        mean[row] = centre;
        inverse[row] = rate;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) out[at + i] = (sum[at + i] - centre) * rate * weight[i] + bias[i];
    }
}

constexpr int64_t kParts = 32;

template <bool kDrops, class T>
void residual_norm_backward(const float *gradient, const float *sum, const float *mean, const float *inverse,
                            const float *weight, const int16_t *random, int64_t threshold, float scale, int64_t rows,
                            int64_t width, float *residual_gradient, T *branch_gradient, float *weight_gradient,
                            float *bias_gradient, int threads) {
    std::vector<float> parts(static_cast<size_t>(2 * kParts * width), 0.0f);
    const int64_t rows_each = (rows + kParts - 1) / kParts;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < kParts; ++part) {
        float *weights = parts.data() + 2 * part * width;
        float *biases = weights + width;
        for (int64_t row = part * rows_each; row < std::min(rows, (part + 1) * rows_each); ++row) {
            const int64_t at = row * width;
            const float centre = mean[row], rate = inverse[row];
            float plain = 0.0f, along = 0.0f;
#pragma omp simd reduction(+ : plain, along)
            for (int64_t i = 0; i < width; ++i) {
                const float normed = (sum[at + i] - centre) * rate;
                const float scaled = gradient[at + i] * weight[i];
                weights[i] += gradient[at + i] * normed;
                biases[i] += gradient[at + i];
                plain += scaled;
                along += scaled * normed;
            }
            plain /= static_cast<float>(width);
            along /= static_cast<float>(width);
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) {
                const float normed = (sum[at + i] - centre) * rate;
                const float value = rate * (gradient[at + i] * weight[i] - plain - normed * along);
                residual_gradient[at + i] = value;
                const bool keeps = !kDrops || random[at + i] >= threshold;
                narrow(keeps ? scale * value : 0.0f, branch_gradient[at + i]);
            }
        }
    }
    for (int64_t part = 0; part < kParts; ++part) {
        const float *weights = parts.data() + 2 * part * width;
        for (int64_t i = 0; i < width; ++i) {
            weight_gradient[i] = (part == 0 ? 0.0f : weight_gradient[i]) + weights[i];
            bias_gradient[i] = (part == 0 ? 0.0f : bias_gradient[i]) + weights[width + i];
        }
    }
}

// x / sqrt(mean(x^2) + epsilon) of each row; `inverse` is what a row is multiplied by, kept for the backward pass.
template <class T>
void rms_norm(const T *x, float epsilon, int64_t rows, int64_t width, float *inverse, T *out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const T *own = x + row * width;
        float square = 0.0f;
#pragma omp simd reduction(+ : square)
        for (int64_t i = 0; i < width; ++i) square += widen(own[i]) * widen(own[i]);
        const float rate = 1.0f / std::sqrt(square / static_cast<float>(width) + epsilon);
        inverse[row] = rate;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) narrow(rate * widen(own[i]), out[row * width + i]);
    }
}

template <class T>
void rms_norm_backward(const T *gradient, const T *x, const float *inverse, int64_t rows, int64_t width, T *result,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const T *own = x + row * width, *given = gradient + row * width;
        const float rate = inverse[row];
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < width; ++i) dot += widen(given[i]) * widen(own[i]);
        const float along = dot * rate * rate / static_cast<float>(width);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            narrow(rate * (widen(given[i]) - along * widen(own[i])), result[row * width + i]);
        }
    }
}

// Each row plus those near it, times a factor for every column: of `each_side` rows before it, from the farthest, then
// of as many behind it. `inside` says of each of these, and each row, whether it counts.
template <class T>
void neighbours(const T *x, const float *factors, const uint8_t *inside, int64_t each_side, int64_t rows,
                int64_t width, T *out, int threads) {
    const int64_t rows_each = (rows + kParts - 1) / kParts;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < kParts; ++part) {
        std::vector<float> sum(static_cast<size_t>(width));
        for (int64_t row = part * rows_each; row < std::min(rows, (part + 1) * rows_each); ++row) {
            for (int64_t i = 0; i < width; ++i) sum[i] = widen(x[row * width + i]);
            for (int64_t near = 0; near < 2 * each_side; ++near) {
                if (!inside[near * rows + row]) continue;
                const T *other = x + (row + near - each_side + (near >= each_side)) * width;
                const float *factor = factors + near * width;
#pragma omp simd
                for (int64_t i = 0; i < width; ++i) sum[i] += factor[i] * widen(other[i]);
            }
            for (int64_t i = 0; i < width; ++i) narrow(sum[i], out[row * width + i]);
        }
    }
}

template <class T>
void neighbours_backward(const T *gradient, const T *x, const float *factors, const uint8_t *inside, int64_t each_side,
                         int64_t rows, int64_t width, T *result, float *factor_gradient, int threads) {
    const int64_t size = 2 * each_side * width, rows_each = (rows + kParts - 1) / kParts;
    std::vector<float> parts(static_cast<size_t>(kParts * size), 0.0f);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < kParts; ++part) {
        std::vector<float> sum(static_cast<size_t>(width));
        for (int64_t row = part * rows_each; row < std::min(rows, (part + 1) * rows_each); ++row) {
            const T *given = gradient + row * width;
            for (int64_t i = 0; i < width; ++i) sum[i] = widen(given[i]);
            for (int64_t near = 0; near < 2 * each_side; ++near) {
                const int64_t shift = near - each_side + (near >= each_side);
                if (inside[near * rows + row]) {
                    const T *other = x + (row + shift) * width;
                    float *own = parts.data() + part * size + near * width;
#pragma omp simd
                    for (int64_t i = 0; i < width; ++i) own[i] += widen(given[i]) * widen(other[i]);
                }
                const int64_t reader = row - shift;
                if (reader >= 0 && reader < rows && inside[near * rows + reader]) {
                    const T *back = gradient + reader * width;
                    const float *factor = factors + near * width;
#pragma omp simd
                    for (int64_t i = 0; i < width; ++i) sum[i] += factor[i] * widen(back[i]);
                }
            }
            for (int64_t i = 0; i < width; ++i) narrow(sum[i], result[row * width + i]);
        }
    }
    for (int64_t part = 0; part < kParts; ++part) {
        for (int64_t i = 0; i < size; ++i) {
            factor_gradient[i] = (part == 0 ? 0.0f : factor_gradient[i]) + parts[part * size + i];
        }
    }
}

// Attention of packed sequences in bfloat16: nothing is gathered into rectangles, and no probability is kept. Every head
// of a sequence is one task, whose result does not depend on which thread computes it.
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define BERTKIT_ATTENTION 1

constexpr int64_t kLanes = 16;
constexpr int kMostRows = 6;
constexpr int kMostVectors = 4;
constexpr int64_t kTile = 48;

inline int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// Sums of products of pairs of bfloat16: `rows` x `vectors` * 16 of them. A pair of `left` meets one of each lane of
// `right`, which lie side by side for each pair.
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
        switch (std::min<int64_t>(kMostVectors, vectors - done)) {
            case 1: multiply_pairs<kRows, 1>(left, left_row, left_step, own, right_step, pairs, result, out_row, scale, adds); break;
            case 2: multiply_pairs<kRows, 2>(left, left_row, left_step, own, right_step, pairs, result, out_row, scale, adds); break;
            case 3: multiply_pairs<kRows, 3>(left, left_row, left_step, own, right_step, pairs, result, out_row, scale, adds); break;
            default: multiply_pairs<kRows, 4>(left, left_row, left_step, own, right_step, pairs, result, out_row, scale, adds);
        }
    }
}

// out (rows x vectors * 16) = scale * left * right, added to what is there if `adds`.
inline void multiply(const uint32_t *left, int64_t left_row, int64_t left_step, const uint32_t *right,
                     int64_t right_step, int64_t pairs, float *out, int64_t out_row, int64_t rows, int64_t vectors,
                     float scale, bool adds) {
    for (int64_t done = 0; done < rows; done += kMostRows) {
        const uint32_t *own = left + done * left_row;
        float *result = out + done * out_row;
        switch (std::min<int64_t>(kMostRows, rows - done)) {
            case 1: multiply_rows<1>(own, left_row, left_step, right, right_step, pairs, result, out_row, vectors, scale, adds); break;
            case 2: multiply_rows<2>(own, left_row, left_step, right, right_step, pairs, result, out_row, vectors, scale, adds); break;
            case 3: multiply_rows<3>(own, left_row, left_step, right, right_step, pairs, result, out_row, vectors, scale, adds); break;
            case 4: multiply_rows<4>(own, left_row, left_step, right, right_step, pairs, result, out_row, vectors, scale, adds); break;
            case 5: multiply_rows<5>(own, left_row, left_step, right, right_step, pairs, result, out_row, vectors, scale, adds); break;
            default: multiply_rows<6>(own, left_row, left_step, right, right_step, pairs, result, out_row, vectors, scale, adds);
        }
    }
}

// Rows one below the other as pairs of rows: out[pair][column] holds rows 2 * pair and 2 * pair + 1; a missing one is 0.
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

// Pairs of a row's columns, with the rows side by side: out[pair][row], 0 behind the last row.
inline void transpose_pairs(const BFloat16 *rows, int64_t stride, int64_t count, int64_t width, uint32_t *out,
                            int64_t out_row) {
    const __m512i steps = _mm512_mullo_epi32(_mm512_set1_epi32(static_cast<int>(stride / 2)),
                                             _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (int64_t row = 0; row < out_row; row += kLanes) {
        const int64_t left = std::min<int64_t>(kLanes, count - row);
        const __mmask16 there = left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1u);
        const uint32_t *own = reinterpret_cast<const uint32_t *>(rows + (left <= 0 ? 0 : row) * stride);
        for (int64_t pair = 0; pair < width / 2; ++pair) {
            const __m512i found = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, steps, own + pair, 4);
            _mm512_storeu_si512(out + pair * out_row + row, found);
        }
    }
}

inline void narrow_rows(const float *rows, int64_t row, int64_t count, int64_t width, BFloat16 *out, int64_t out_row) {
    for (int64_t i = 0; i < count; ++i) {
#pragma omp simd
        for (int64_t column = 0; column < width; ++column) narrow(rows[i * row + column], out[i * out_row + column]);
    }
}

// Softmax of the scores from `low` to `high`, and dropout as above.
inline void softmax_range(const float *scores, int64_t low, int64_t high, const int16_t *random, int64_t threshold,
                          float keep_scale, BFloat16 *out, float &log_sum) {
    const float top = largest(scores + low, high - low);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = low; i < high; ++i) sum += fast_exp(scores[i] - top);
    log_sum = top + std::log(sum);
    if (random == nullptr) {
        const float factor = 1.0f / sum;
#pragma omp simd
        for (int64_t i = low; i < high; ++i) narrow(factor * fast_exp(scores[i] - top), out[i]);
        return;
    }
    const float factor = keep_scale / sum;
#pragma omp simd
    for (int64_t i = low; i < high; ++i) {
        const float value = factor * fast_exp(scores[i] - top);
        narrow(random[i] >= threshold ? value : 0.0f, out[i]);
    }
}

// From the scores and the gradient of the dropped shares: these, and the gradient of the scores; both 0 elsewhere.
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

// What is the same for all heads of a batch.
struct Attention {
    const int32_t *bounds;       // of the sequences, among the packed tokens
    const uint8_t *causal;       // of each sequence, whether no token attends to those behind it; null: none
    const int64_t *random_start; // of each sequence, where its random bits begin; null: nothing is dropped
    const int16_t *random;
    int64_t sequences, heads, width;
    bool one_query;      // whether each sequence has one query, which attends to all of it; else its tokens are queries
    int64_t left, right; // tokens of a window on either side, -1: all
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
                    const float *score = scores.data() + row * padded;
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
                        BFloat16 *value_gradient, int threads) {
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
            const int64_t out = asked * out_row + head * width, key_out = start * out_row + head * width;
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
                    narrow_rows(mixed.data(), width, rows, width, query_gradient + out + first * out_row, out_row);
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
            narrow_rows(key_sum.data(), width, length, width, key_gradient + key_out, out_row);
            narrow_rows(value_sum.data(), width, length, width, value_gradient + key_out, out_row);
        }
    }
}
#endif

}  // namespace

// One function for each type of element, named by it.
#define BERTKIT_EXPORT(NAME, T)                                                                                       \
    extern "C" void gelu_tanh_##NAME(const T *x, T *y, int64_t count, int threads) {                                  \
        activation<GeluByTanh>(x, y, count, threads);                                                                 \
    }                                                                                                                 \
    extern "C" void gelu_tanh_backward_##NAME(const T *x, const T *gradient, T *out, int64_t count, int threads) {    \
        activation_backward<GeluByTanh>(x, gradient, out, count, threads);                                            \
    }                                                                                                                 \
    extern "C" void gelu_exact_backward_##NAME(const T *x, const T *gradient, T *out, int64_t count, int threads) {   \
        activation_backward<GeluExact>(x, gradient, out, count, threads);                                             \
    }                                                                                                                 \
    extern "C" void cross_entropy_##NAME(T *logits, int64_t rows, int64_t words, const int64_t *label,                \
                                         const float *weight, float z_loss, float smoothing, int learning,            \
                                         double *loss, uint8_t *correct, int threads) {                               \
        cross_entropy(logits, rows, words, label, weight, z_loss, smoothing, learning != 0, loss, correct, threads);  \
    }                                                                                                                 \
    extern "C" void softmax_dropout_##NAME(const T *scores, const int64_t *visible, int64_t rows_each, int64_t rows,  \
                                           int64_t keys, const int16_t *random, int64_t threshold, float scale,       \
                                           T *out, float *log_sum, int threads) {                                     \
        softmax_dropout(scores, visible, rows_each, rows, keys, random, static_cast<int>(threshold), scale, out,      \
                        log_sum, threads);                                                                            \
    }                                                                                                                 \
    extern "C" void softmax_dropout_backward_##NAME(                                                                  \
        const T *scores, const T *out, const float *log_sum, const T *gradient, const int64_t *visible,               \
        int64_t rows_each, int64_t rows, int64_t keys, float scale, T *result, int threads) {                         \
        softmax_dropout_backward(scores, out, log_sum, gradient, visible, rows_each, rows, keys, scale, result,       \
                                 threads);                                                                            \
    }                                                                                                                 \
    extern "C" void residual_norm_##NAME(const float *residual, const T *branch, const int16_t *random,               \
                                         int64_t threshold, float scale, const float *weight, const float *bias,          \
                                         float epsilon, int64_t rows, int64_t width, float *sum, float *mean,         \
                                         float *inverse, float *out, int threads) {                                   \
        (random == nullptr ? residual_norm<false, T> : residual_norm<true, T>)(residual, branch, random, threshold, scale, weight, bias, epsilon, rows, width, sum, mean,      \
                      inverse, out, threads);                                                                         \
    }                                                                                                                 \
    extern "C" void residual_norm_backward_##NAME(                                                                    \
        const float *gradient, const float *sum, const float *mean, const float *inverse, const float *weight,        \
        const int16_t *random, int64_t threshold, float scale, int64_t rows, int64_t width, float *residual_gradient,     \
        T *branch_gradient, float *weight_gradient, float *bias_gradient, int threads) {                              \
        (random == nullptr ? residual_norm_backward<false, T> : residual_norm_backward<true, T>)(gradient, sum, mean, inverse, weight, random, threshold, scale, rows, width,           \
                               residual_gradient, branch_gradient, weight_gradient, bias_gradient, threads);          \
    }                                                                                                                 \
    extern "C" void rms_norm_##NAME(const T *x, float epsilon, int64_t rows, int64_t width, float *inverse, T *out,   \
                                    int threads) {                                                                    \
        rms_norm(x, epsilon, rows, width, inverse, out, threads);                                                     \
    }                                                                                                                 \
    extern "C" void rms_norm_backward_##NAME(const T *gradient, const T *x, const float *inverse, int64_t rows,       \
                                             int64_t width, T *result, int threads) {                                 \
        rms_norm_backward(gradient, x, inverse, rows, width, result, threads);                                        \
    }                                                                                                                 \
    extern "C" void neighbours_##NAME(const T *x, const float *factors, const uint8_t *inside, int64_t each_side,     \
                                      int64_t rows, int64_t width, T *out, int threads) {                             \
        neighbours(x, factors, inside, each_side, rows, width, out, threads);                                         \
    }                                                                                                                 \
    extern "C" void neighbours_backward_##NAME(const T *gradient, const T *x, const float *factors,                   \
                                               const uint8_t *inside, int64_t each_side, int64_t rows, int64_t width, \
                                               T *result, float *factor_gradient, int threads) {                      \
        neighbours_backward(gradient, x, factors, inside, each_side, rows, width, result, factor_gradient, threads);  \
    }

BERTKIT_EXPORT(float32, float)
BERTKIT_EXPORT(bfloat16, BFloat16)

#ifdef BERTKIT_ATTENTION
extern "C" void attention_bfloat16(const BFloat16 *query, int64_t query_row, const BFloat16 *key, int64_t key_row,
                                   const BFloat16 *value, int64_t value_row, const int32_t *bounds,
                                   const uint8_t *causal, const int64_t *random_start, const int16_t *random,
                                   int64_t sequences, int64_t heads, int64_t width, int one_query, int64_t left,
                                   int64_t right, int64_t threshold, float keep_scale, float scale, BFloat16 *out, float *log_sum,
                                   int threads) {
    const Attention all{bounds, causal, random_start, random, sequences, heads, width, one_query != 0, left, right, threshold, keep_scale, scale};
    attention(query, query_row, key, key_row, value, value_row, all, out, log_sum, threads);
}

extern "C" void attention_backward_bfloat16(const BFloat16 *query, int64_t query_row, const BFloat16 *key,
                                            int64_t key_row, const BFloat16 *value, int64_t value_row,
                                            const int32_t *bounds, const uint8_t *causal, const int64_t *random_start,
                                            const int16_t *random, int64_t sequences, int64_t heads, int64_t width,
                                            int one_query, int64_t left, int64_t right, int64_t threshold,
                                            float keep_scale, float scale, const BFloat16 *given, const float *log_sum,
                                            BFloat16 *query_gradient, BFloat16 *key_gradient, BFloat16 *value_gradient,
                                            int threads) {
    const Attention all{bounds, causal, random_start, random, sequences, heads, width, one_query != 0, left, right, threshold, keep_scale, scale};
    attention_backward(query, query_row, key, key_row, value, value_row, given, log_sum, all, query_gradient, key_gradient, value_gradient, threads);
}
#endif
