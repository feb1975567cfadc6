// Words of a corpus and their tokens: each distinct word is split into WordPiece tokens once.
//
// Plain C functions over a table owned by the caller, called through ctypes (compiled_words.py), which checks sizes.
// A word of printable ASCII is split here like BERT's tokenizer does (Devlin et al. 2019, arXiv:1810.04805): at every
// sign that is neither letter nor digit, then into the longest tokens of the vocabulary from left to right (Wu et al.
// 2016, arXiv:1609.08144). Every other word is returned to the caller, which tokenises it and sets its tokens.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int32_t kNone = -1;
constexpr int64_t kKeyBytes = 8;
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15ull;  // 2^64 over the golden ratio: Knuth, TAOCP 3, section 6.4

inline uint64_t mixed(uint64_t hash, uint64_t next) {
    hash = (hash ^ next) * kFactor;
    return hash ^ (hash >> 29);
}

inline uint64_t hash_of(const uint8_t *bytes, int64_t size) {
    uint64_t hash = static_cast<uint64_t>(size) * kFactor, next;
    for (; size >= kKeyBytes; bytes += kKeyBytes, size -= kKeyBytes) {
        std::memcpy(&next, bytes, kKeyBytes);
        hash = mixed(hash, next);
    }
    next = 0;
    std::memcpy(&next, bytes, static_cast<size_t>(size));
    return mixed(hash, next);
}

// The bytes before the first one equal to `separator`, at most `size`: eight at once, by the carry that a zero byte
// leaves (Mycroft 1987), on machines that store the lowest byte first.
inline int64_t until(const uint8_t *bytes, int64_t size, uint8_t separator) {
    constexpr uint64_t kOnes = 0x0101010101010101ull, kHighs = 0x8080808080808080ull;
    int64_t done = 0;
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; done + kKeyBytes <= size; done += kKeyBytes) {
        uint64_t next;
        std::memcpy(&next, bytes + done, kKeyBytes);
        next ^= kOnes * separator;
        const uint64_t found = (next - kOnes) & ~next & kHighs;
        if (found != 0) return done + __builtin_ctzll(found) / 8;
    }
#endif
    while (done < size && bytes[done] != separator) ++done;
    return done;
}

// The tokens of printable ASCII, letter by letter: node 0 starts those that begin a word, node 1 the others.
class Pieces {
  public:
    Pieces() : children_(1 << 12, Child{kNone, kNone}), id_{kNone, kNone} {}

    void add(const uint8_t *bytes, int64_t size, bool continues, int32_t id) {
        if (size == 0) return;
        int32_t node = continues;
        for (int64_t i = 0; i < size; ++i) {
            const int32_t key = node << 8 | bytes[i];
            if (2 * id_.size() > children_.size()) grow();
            Child &child = children_[place(key)];
            if (child.key == kNone) {
                child = Child{key, static_cast<int32_t>(id_.size())};
                id_.push_back(kNone);
            }
            node = child.node;
        }
        id_[static_cast<size_t>(node)] = id;
    }

    // The longest token at the start of these bytes: its id, or none, and its size.
    int32_t longest(const uint8_t *bytes, int64_t size, bool continues, int64_t &length) const {
        int32_t node = continues, found = kNone;
        for (int64_t i = 0; i < size; ++i) {
            const int32_t key = node << 8 | bytes[i];
            const Child &child = children_[place(key)];
            if (child.key == kNone) break;
            node = child.node;
            const int32_t id = id_[static_cast<size_t>(node)];
            if (id == kNone) continue;
            found = id;
            length = i + 1;
        }
        return found;
    }

  private:
    struct Child {
        int32_t key, node;
    };

    size_t place(int32_t key) const {
        const size_t mask = children_.size() - 1;
        size_t at = static_cast<size_t>(mixed(0, static_cast<uint64_t>(key))) & mask;
        while (children_[at].key != kNone && children_[at].key != key) at = (at + 1) & mask;
        return at;
    }

    void grow() {
        std::vector<Child> before(2 * children_.size(), Child{kNone, kNone});
        before.swap(children_);
        for (const Child &child : before) {
            if (child.key != kNone) children_[place(child.key)] = child;
        }
    }

    std::vector<Child> children_;
    std::vector<int32_t> id_;  // of the token that ends at each node
};

inline bool is_letter_or_digit(uint8_t byte) {
    return (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z');
}

class Words {
  public:
    Words(uint8_t separator, bool cuts, int32_t unknown, int64_t longest)
        : separator_(separator), cuts_(cuts), unknown_(unknown), longest_(longest) {
        clear();
    }

    Pieces pieces;

    // Forget all words except the border between two texts, number 0, which has no tokens.
    void clear() {
        slots_.assign(1 << 16, Slot{0, kNone, 0});
        bytes_.clear();
        words_.clear();
        tokens_.clear();
        const uint8_t border = '\n';
        number(&border, 1, 1);
    }

    int64_t count() const { return static_cast<int64_t>(words_.size()); }
    int64_t tokens() const { return static_cast<int64_t>(tokens_.size()); }

    // Numbers of the words between separators, and the new ones among them, whose tokens the caller must set.
    int64_t read(const uint8_t *content, int64_t size, int32_t *numbers, int32_t *unknown_word, int64_t *unknown_start,
                 int64_t *unknown_end, int64_t &unknown_count) {
        int64_t found = 0, start = 0;
        unknown_count = 0;
        while (start <= size) {
            const int64_t end = start + until(content + start, size - start, separator_);
            const int64_t known = count();
            const int32_t own = number(content + start, end - start, size - start);
            if (own == known && !cut(words_.back())) {
                unknown_word[unknown_count] = own;
                unknown_start[unknown_count] = start;
                unknown_end[unknown_count++] = end;
            }
            numbers[found++] = own;
            start = end + 1;
        }
        return found;
    }

    void set_tokens(int64_t count, const int32_t *numbers, const int64_t *lengths, const int64_t *ids) {
        for (int64_t i = 0; i < count; ++i) {
            Word &word = words_[static_cast<size_t>(numbers[i])];
            word.first = tokens();
            word.length = static_cast<int32_t>(lengths[i]);
            for (int64_t k = 0; k < lengths[i]; ++k) tokens_.push_back(static_cast<int32_t>(*ids++));
        }
    }

    int64_t total(const int32_t *numbers, int64_t count) const {
        int64_t sum = 0;
        for (int64_t i = 0; i < count; ++i) sum += words_[static_cast<size_t>(numbers[i])].length;
        return sum;
    }

    // The concatenated ids of all words, and the number of ids of each text.
    void write(const int32_t *numbers, int64_t count, int64_t *ids, int64_t *lengths) const {
        int64_t *const begin = ids;
        int64_t before = 0;
        for (int64_t i = 0; i < count; ++i) {
            const Word &word = words_[static_cast<size_t>(numbers[i])];
            const int32_t *own = tokens_.data() + word.first;
            for (int32_t k = 0; k < word.length; ++k) *ids++ = own[k];
            if (numbers[i] != 0 && i + 1 < count) continue;
            *lengths++ = ids - begin - before;
            before = ids - begin;
        }
    }

  private:
    static constexpr int32_t kLong = -1;
    struct Slot {
        uint64_t key;
        int32_t number;
        int32_t size;  // of the word, if it is its key
    };
    struct Word {
        int64_t start;
        int64_t size;
        int64_t first;
        int32_t length;
    };

    // The word itself if it has at most eight bytes, else its hash; `readable` bytes may be read.
    static Slot looked_for(const uint8_t *bytes, int64_t size, int64_t readable) {
        if (size > kKeyBytes) return Slot{hash_of(bytes, size), kNone, kLong};
        uint64_t key = 0;
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        if (readable >= kKeyBytes) {
            std::memcpy(&key, bytes, kKeyBytes);
            key = size == 0 ? 0 : key << 8 * (kKeyBytes - size) >> 8 * (kKeyBytes - size);
            return Slot{key, kNone, static_cast<int32_t>(size)};
        }
#endif
        std::memcpy(&key, bytes, static_cast<size_t>(size));
        return Slot{key, kNone, static_cast<int32_t>(size)};
    }

    size_t place(const Slot &slot) const {
        return static_cast<size_t>(mixed(static_cast<uint64_t>(slot.size), slot.key)) & (slots_.size() - 1);
    }

    int32_t number(const uint8_t *bytes, int64_t size, int64_t readable) {
        Slot slot = looked_for(bytes, size, readable);
        size_t at = place(slot);
        for (; slots_[at].number != kNone; at = (at + 1) & (slots_.size() - 1)) {
            if (slots_[at].key != slot.key || slots_[at].size != slot.size) continue;
            if (slot.size != kLong) return slots_[at].number;
            const Word &word = words_[static_cast<size_t>(slots_[at].number)];
            if (word.size == size && std::memcmp(bytes_.data() + word.start, bytes, static_cast<size_t>(size)) == 0) {
                return slots_[at].number;
            }
        }
        slot.number = static_cast<int32_t>(words_.size());
        slots_[at] = slot;
        words_.push_back(Word{static_cast<int64_t>(bytes_.size()), size, 0, 0});
        bytes_.insert(bytes_.end(), bytes, bytes + size);
        if (2 * words_.size() > slots_.size()) grow();
        return slot.number;
    }

    void grow() {
        std::vector<Slot> before(2 * slots_.size(), Slot{0, kNone, 0});
        before.swap(slots_);
        for (const Slot &slot : before) {
            if (slot.number == kNone) continue;
            size_t at = place(slot);
            while (slots_[at].number != kNone) at = (at + 1) & (slots_.size() - 1);
            slots_[at] = slot;
        }
    }

    // Find the tokens of a word of printable ASCII; false for any other word.
    bool cut(Word &word) {
        if (!cuts_) return false;
        const uint8_t *bytes = bytes_.data() + word.start;
        for (int64_t i = 0; i < word.size; ++i) {
            if (bytes[i] <= ' ' || bytes[i] > '~') return false;
        }
        word.first = tokens();
        for (int64_t start = 0, end; start < word.size; start = end) {
            end = start + 1;
            if (is_letter_or_digit(bytes[start])) {
                while (end < word.size && is_letter_or_digit(bytes[end])) ++end;
            }
            cut_part(bytes + start, end - start);
        }
        word.length = static_cast<int32_t>(tokens() - word.first);
        return true;
    }

    void cut_part(const uint8_t *bytes, int64_t size) {
        const size_t before = tokens_.size();
        for (int64_t start = 0, length = 0; start < size && size <= longest_; start += length) {
            const int32_t id = pieces.longest(bytes + start, size - start, start > 0, length);
            if (id == kNone) {
                tokens_.resize(before);
                break;
            }
            tokens_.push_back(id);
        }
        if (tokens_.size() == before) tokens_.push_back(unknown_);
    }

    uint8_t separator_;
    bool cuts_;
    int32_t unknown_;
    int64_t longest_;
    std::vector<Slot> slots_;
    std::vector<uint8_t> bytes_;
    std::vector<Word> words_;
    std::vector<int32_t> tokens_;
};

}  // namespace

extern "C" {

void *words_new(int separator, int cuts, int32_t unknown, int64_t longest) {
    return new Words(static_cast<uint8_t>(separator), cuts != 0, unknown, longest);
}

void words_free(Words *words) { delete words; }

void words_add_piece(Words *words, const uint8_t *bytes, int64_t size, int continues, int32_t id) {
    words->pieces.add(bytes, size, continues != 0, id);
}

void words_clear(Words *words) { words->clear(); }
int64_t words_count(const Words *words) { return words->count(); }
int64_t words_tokens(const Words *words) { return words->tokens(); }

// Number of words of a content: one more than separators.
int64_t words_in(const uint8_t *content, int64_t size, int separator) {
    int64_t found = 1;
    for (int64_t i = 0; i < size; ++i) found += content[i] == separator;
    return found;
}

int64_t words_read(Words *words, const uint8_t *content, int64_t size, int32_t *numbers, int32_t *unknown_word,
                   int64_t *unknown_start, int64_t *unknown_end, int64_t *unknown_count) {
    return words->read(content, size, numbers, unknown_word, unknown_start, unknown_end, *unknown_count);
}

void words_set_tokens(Words *words, int64_t count, const int32_t *numbers, const int64_t *lengths, const int64_t *ids) {
    words->set_tokens(count, numbers, lengths, ids);
}

int64_t words_total(const Words *words, const int32_t *numbers, int64_t count) { return words->total(numbers, count); }

void words_write(const Words *words, const int32_t *numbers, int64_t count, int64_t *ids, int64_t *lengths) {
    words->write(numbers, count, ids, lengths);
}

}  // extern "C"
