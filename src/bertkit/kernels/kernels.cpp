// Loops over rows of float32 or bfloat16, each of which replaces several passes of torch's operators over memory.
//
// These are plain C functions over pointers, called through ctypes (loading.py): they need no torch headers and build
// in seconds. Arithmetic is in float32 for both types in memory. Each row is computed by one thread in an order that
// does not depend on the number of threads, and sums over rows are formed in a fixed number of parts. Results are
// therefore bit-identical with any number of threads. Non-finite values stay non-finite.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "elements.h"

namespace {

constexpr float kRootTwoOverPi = 0.7978845608028654f;
constexpr float kCubic = 0.044715f;
constexpr float kRootHalf = 0.7071067811865476f;
constexpr float kInverseRootTwoPi = 0.3989422804014327f;

// Uses the exponential of a number that is not positive, which cannot overflow.
inline float tanh_by_exp(float x) {
    const float decay = fast_exp(-2.0f * std::fabs(x));
    return std::copysign((1.0f - decay) / (1.0f + decay), x);
}

// The normal distribution function; Abramowitz and Stegun 1964, 7.1.26. Accurate to 1.5e-7.
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

// Both forms of GELU. The exact one has no forward pass here: torch's own is as fast.
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

// The next numbers of SFC64 (Doty-Humphrey's PractRand), as numpy draws them; the state is three words and a counter.
inline void random_words(const uint64_t *state, int64_t count, uint64_t *out) {
    uint64_t a = state[0], b = state[1], c = state[2], counter = state[3];
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t drawn = a + b + counter++;
        a = b ^ (b >> 11);
        b = c + (c << 3);
        c = ((c << 24) | (c >> 40)) + drawn;
        out[i] = drawn;
    }
}

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
void cross_entropy(T *logits, const T *bias, int64_t rows, int64_t words, const int64_t *label, const float *weight,
                   float z_loss, float smoothing, bool learning, double *loss, uint8_t *correct, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> values(static_cast<size_t>(words));
        float *of_words = values.data();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            T *own = logits + row * words;
            const int64_t word = label[row];
            if (bias == nullptr) {
#pragma omp simd
                for (int64_t i = 0; i < words; ++i) of_words[i] = widen(own[i]);
            } else {
#pragma omp simd
                for (int64_t i = 0; i < words; ++i) of_words[i] = widen(own[i]) + widen(bias[i]);
            }
            const float top = largest(of_words, words);
            const float label_logit = of_words[word];
            bool first = label_logit == top;
            for (int64_t i = 0; first && i < word; ++i) first = of_words[i] != top;
            correct[row] = first;
            float sum = 0.0f, sum_logits = 0.0f;
            if (smoothing != 0.0f) {
#pragma omp simd reduction(+ : sum_logits)
                for (int64_t i = 0; i < words; ++i) sum_logits += of_words[i];
            }
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < words; ++i) {
                of_words[i] = fast_exp(of_words[i] - top);
                sum += of_words[i];
            }
            const float log_sum = top + std::log(sum);
            const float factor = weight == nullptr ? 1.0f : weight[row];
            const float mean = sum_logits / static_cast<float>(words);
            const float aim = (1.0f - smoothing) * label_logit + smoothing * mean;
            loss[row] = static_cast<double>(factor * (log_sum - aim) + z_loss * log_sum * log_sum);
            if (!learning) continue;
            const float scale = (factor + 2.0f * z_loss * log_sum) / sum;
            const float even = factor * smoothing / static_cast<float>(words);
            const float at_label = scale * of_words[word] - even - (1.0f - smoothing) * factor;
#pragma omp simd
            for (int64_t i = 0; i < words; ++i) narrow(scale * of_words[i] - even, own[i]);
            narrow(at_label, own[word]);
        }
    }
}

// Softmax of each row of scores over its first `seen` keys (one entry of `visible` for every `rows_each` rows), then
// dropout: probabilities whose random bits are below `threshold` are dropped. `log_sum` is for the backward pass.
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

// A probability counts as dropped if its output is zero: if it is zero without dropout, its gradient is zero, too.
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

// norm(residual + dropout(branch)). `sum` is the input of the norm, kept for the backward pass with its mean and
// inverse standard deviation.
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

// x / sqrt(mean(x^2) + epsilon) of each row; `inverse` is the factor of each row, kept for the backward pass.
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

// Each row plus its neighbours, each times a factor per column: `each_side` rows before it, starting with the farthest,
// then as many after it. `inside` marks for each neighbour and each row whether it counts.
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

}  // namespace

// One function for each element type, with the type in its name.
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
    extern "C" void cross_entropy_##NAME(T *logits, const T *bias, int64_t rows, int64_t words, const int64_t *label, \
                                         const float *weight, float z_loss, float smoothing, int learning,            \
                                         double *loss, uint8_t *correct, int threads) {                               \
        cross_entropy(logits, bias, rows, words, label, weight, z_loss, smoothing, learning != 0, loss, correct,      \
                      threads);                                                                                       \
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

extern "C" void random_words_int64(const uint64_t *state, int64_t count, uint64_t *out, int) {
    random_words(state, count, out);
}
