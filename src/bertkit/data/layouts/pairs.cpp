// Pairs of a pass: documents are divided into chunks, and each chunk into two segments of a pair.
//
// One plain C function without memory of its own, called through ctypes (compiled_pairs.py), which checks sizes. It is
// PairPlanner.plan_document (pairs.py) with the same draws, and gives the same pairs.

#include <algorithm>
#include <cstdint>

namespace {

enum Draws { kSplit, kRandom, kStart, kDocument, kSwap, kDraws };
enum State { kAtDocument, kAtSegment, kUsed, kRows };

// The first segment in [first, last) that begins at `token` or later, else `last`.
inline int64_t segment_from(const int64_t *start, int64_t first, int64_t last, int64_t token) {
    while (first < last && start[first] < token) ++first;
    return std::min(first, last);
}

}  // namespace

// Lists pairs until draws or documents are used up, and returns 0; or returns 1 where the random partner that is drawn
// is the document itself. Then the next call continues with `partner`, which the caller has drawn.
//
// start: the token at which each segment begins. documents: the first segment of each, and the one after its last.
// targets: tokens of the chunks of each document; null: chunks have two segments, and random partners one.
// draws: those of each chunk. state: document, segment, chunks and pairs so far. rows: six numbers for each pair.
extern "C" int32_t pairs_list(const int64_t *start, const int64_t *documents, int64_t count, const int64_t *targets,
                              const double *draws, int64_t chunks, double random_probability, double swap_probability,
                              int32_t pairs_lone_segments, int64_t partner, int64_t *state, int64_t *rows) {
    int64_t document = state[kAtDocument], segment = state[kAtSegment], used = state[kUsed], made = state[kRows];
    const auto stopped = [&](int32_t reason) {
        state[kAtDocument] = document, state[kAtSegment] = segment, state[kUsed] = used, state[kRows] = made;
        return reason;
    };
    const auto add = [&](int64_t a, int64_t a_end, int64_t b, int64_t b_end, int64_t random, int64_t swapped) {
        int64_t *row = rows + 6 * made++;
        row[0] = a, row[1] = a_end, row[2] = b, row[3] = b_end, row[4] = random, row[5] = swapped;
    };
    for (; document < count; ++document, segment = 0) {
        const int64_t low = documents[2 * document], high = documents[2 * document + 1];
        while (low + segment < high) {
            if (used == chunks) return stopped(0);
            const double *draw = draws + kDraws * used;
            const int64_t first = low + segment;
            const int64_t chunk_end = targets == nullptr
                                          ? std::min(first + 2, high)
                                          : segment_from(start, first + 1, high, start[first] + targets[document]);
            const int64_t begin = start[first], end = start[chunk_end];
            const bool lone = chunk_end - first == 1;
            int64_t first_end = first + 1;
            if (!lone) first_end += static_cast<int64_t>(draw[kSplit] * static_cast<double>(chunk_end - first - 1));
            if (draw[kRandom] < random_probability || (lone && pairs_lone_segments)) {
                int64_t other = partner;
                if (other < 0) other = static_cast<int64_t>(draw[kDocument] * static_cast<double>(count));
                if (partner < 0 && other == document) return stopped(1);
                partner = -1;
                const int64_t other_low = documents[2 * other], other_high = documents[2 * other + 1];
                const int64_t run =
                    other_low + static_cast<int64_t>(draw[kStart] * static_cast<double>(other_high - other_low));
                const int64_t tokens = targets == nullptr ? 1 : targets[document] - (start[first_end] - begin);
                const int64_t run_end = segment_from(start, run + 1, other_high, start[run] + tokens);
                add(begin, start[first_end], start[run], start[run_end], 1, 0);
                segment = first_end - low;
                ++used;
                continue;
            }
            segment = chunk_end - low;
            ++used;
            const int64_t middle =
                lone ? begin + 1 + static_cast<int64_t>(draw[kSplit] * static_cast<double>(end - begin - 1))
                     : start[first_end];
            if (middle == end) continue;  // a lone segment of one token, which cannot be cut
            if (draw[kSwap] < swap_probability)
                add(middle, end, begin, middle, 0, 1);
            else
                add(begin, middle, middle, end, 0, 0);
        }
    }
    return stopped(0);
}
