#include "runtime/token_data.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <variant>

#include <sys/mman.h>
#include <sys/stat.h>

#include <fmt/format.h>

#include "models/error.h"
#include "models/overloaded.h"
#include "runtime/atomic_file.h"
#include "runtime/checksum.h"
#include "runtime/random.h"

namespace zeroplan {
namespace {

// --- order -------------------------------------------------------------------------------------------

/// Two halves of `bits` each, four rounds.
std::uint64_t feistel(std::uint64_t value, int bits, std::uint64_t key) {
  const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
  std::uint64_t left = value >> bits;
  std::uint64_t right = value & mask;
  for (std::uint64_t round = 0; round < 4; ++round) {
    left ^= random_bits(random_key(key, round), right) & mask;
    std::swap(left, right);
  }
  return left << bits | right;
}

// --- made-up sequences -------------------------------------------------------------------------------

constexpr std::int64_t kStates = 64;
constexpr std::uint64_t kFollowEighths = 7;  // of 8 steps follow the chain

struct Chain {
  std::int64_t states = 1, multiplier = 1, increment = 0;

  Chain(std::int64_t vocab, std::uint64_t seed) : states(std::min(vocab, kStates)) {
    const auto choices = static_cast<std::uint64_t>(states);
    if (states == 1) return;
    increment = 1 + static_cast<std::int64_t>(random_bits(seed, 0) % (choices - 1));
    // Coprime: every state has one predecessor, so all states stay equally frequent.
    multiplier = static_cast<std::int64_t>(random_bits(seed, 1) % choices);
    while (std::gcd(multiplier, states) != 1) multiplier = (multiplier + 1) % states;
  }
  std::int64_t next(std::int64_t state, std::uint64_t bits) const {
    if ((bits & 7u) < kFollowEighths) return (multiplier * state + increment) % states;
    return static_cast<std::int64_t>((bits >> 3) % static_cast<std::uint64_t>(states));
  }
};

struct Synthetic {
  Chain chain;
};

// --- files -------------------------------------------------------------------------------------------

constexpr std::string_view kMagic = "ZPTOKENS";
constexpr std::int64_t kHeaderBytes = 40;
constexpr std::uint32_t kVersion = 1;

/// docs/files.md, "Token files".
struct Header {
  std::array<char, 8> magic;
  std::uint32_t version, bytes_per_token;
  std::uint64_t vocab, count;
  std::uint32_t reserved, checksum;  // CRC-32 of what stands before the checksum
};
static_assert(sizeof(Header) == kHeaderBytes);

[[noreturn]] void refuse(const InputFile& file, const std::string& message) {
  throw InputError(fmt::format("{}: {}", file.path().string(), message));
}

void check_header(const InputFile& file, const Header& header) {
  if (std::string_view(header.magic.data(), header.magic.size()) != kMagic) {
    refuse(file,
           "expected a token file (it would begin with \"ZPTOKENS\"; examples/make_tokens.py makes one from text)");
  }
  std::array<std::byte, kHeaderBytes> raw;
  std::memcpy(raw.data(), &header, raw.size());
  const std::uint32_t found = crc32(std::span(raw).first(kHeaderBytes - 4));
  if (found != header.checksum) {
    refuse(file,
           fmt::format("damaged header: expected checksum {:08x} at offset 36, found {:08x}", header.checksum, found));
  }
  if (header.version != kVersion) refuse(file, fmt::format("expected version 1 at offset 8, found {}", header.version));
  if (header.bytes_per_token != 2 && header.bytes_per_token != 4) {
    refuse(file, fmt::format("expected 2 or 4 bytes a token at offset 12, found {}", header.bytes_per_token));
  }
  if (header.reserved != 0) refuse(file, fmt::format("expected 0 at offset 32, found {}", header.reserved));
  const std::uint64_t data = static_cast<std::uint64_t>(file.size() - kHeaderBytes);
  const std::uint64_t whole = data / header.bytes_per_token;
  if (header.count != whole || data % header.bytes_per_token != 0) {
    refuse(file, fmt::format("{}: expected {} tokens of {} bytes after the header, found {} bytes",
                             header.count > whole ? "truncated" : "longer than it says", header.count,
                             header.bytes_per_token, data));
  }
}

/// A read-only mapping of a whole file.
class Mapping {
 public:
  explicit Mapping(const InputFile& file) : size_(static_cast<std::size_t>(file.size())) {
    void* const at = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.descriptor(), 0);
    if (at == MAP_FAILED) throw DeviceError(fmt::format("{}: mmap: {}", file.path().string(), std::strerror(errno)));
    data_ = static_cast<const std::byte*>(at);
  }
  Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() {
    if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
  }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_;
};

struct TokenFile {
  InputFile file;
  Mapping mapping;
  Header header;
  std::int64_t windows = 0;

  std::int64_t size_of_token() const { return header.bytes_per_token; }

  /// A page of a mapped file that was cut short meanwhile is a bus error: look first.
  void check_size() const {
    struct stat status {};
    if (::fstat(file.descriptor(), &status) != 0) {
      throw DeviceError(fmt::format("{}: fstat: {}", file.path().string(), std::strerror(errno)));
    }
    if (status.st_size < file.size()) {
      refuse(file, fmt::format("truncated while in use: expected {} bytes, found {}", file.size(), status.st_size));
    }
  }
  std::int64_t token(std::int64_t index) const {
    const std::byte* const at = mapping.bytes().data() + kHeaderBytes + index * size_of_token();
    std::uint32_t value = 0;
    std::memcpy(&value, at, header.bytes_per_token);
    return value;
  }
};

TokenFile open_token_file(const std::filesystem::path& path, const SequenceShape& shape) {
  InputFile file(path);
  if (file.size() < kHeaderBytes) {
    refuse(file,
           fmt::format("expected a token file with a header of {} bytes, found {} bytes", kHeaderBytes, file.size()));
  }
  Header header{};
  file.read(0, std::as_writable_bytes(std::span(&header, 1)));
  check_header(file, header);
  if (header.vocab > static_cast<std::uint64_t>(shape.vocab)) {
    refuse(file, fmt::format("its vocabulary of {} is larger than the model's of {}", header.vocab, shape.vocab));
  }
  const auto count = static_cast<std::int64_t>(header.count);
  if (count <= shape.seq_len) {
    refuse(file, fmt::format("expected at least {} tokens (sequence length {} and the last target), found {}",
                             shape.seq_len + 1, shape.seq_len, count));
  }
  Mapping mapping(file);
  return {std::move(file), std::move(mapping), header, (count - 1) / shape.seq_len};
}

std::string file_fingerprint(const TokenFile& tokens) {
  constexpr std::size_t kHalf = std::size_t{32} << 20;
  const auto data = tokens.mapping.bytes().subspan(kHeaderBytes);
  Xxh64 hash;
  if (data.size() <= 2 * kHalf) {
    hash.update(data);
  } else {
    hash.update(data.first(kHalf));
    hash.update(data.last(kHalf));
  }
  return fmt::format("file of {} tokens, vocabulary {}, checksum {}", tokens.header.count, tokens.header.vocab,
                     checksum_text(hash.digest()));
}

}  // namespace

struct TokenData::Source {
  SequenceShape shape;
  std::uint64_t seed;
  std::variant<Synthetic, TokenFile> kind;
};

std::int64_t permuted(std::int64_t index, std::int64_t count, std::uint64_t key) {
  if (index < 0 || index >= count) throw std::logic_error("permuted: index outside the range");
  const auto last = static_cast<std::uint64_t>(count - 1);
  const int bits = std::max(1, (static_cast<int>(std::bit_width(last)) + 1) / 2);
  auto value = static_cast<std::uint64_t>(index);
  // Walking a cycle of a permutation of the larger set comes back inside after less than 4 steps on average.
  do {
    value = feistel(value, bits, key);
  } while (value > last);
  return static_cast<std::int64_t>(value);
}

namespace {

void check_shape(const SequenceShape& shape) {
  if (shape.seq_len < 1 || shape.global_batch < 1) throw std::logic_error("token data: empty sequences or batches");
  if (shape.vocab < 1) throw InputError("token data: the model has no vocabulary to train on");
}

void write_pair(std::int64_t index, std::int64_t token, std::span<std::int32_t> inputs,
                std::span<std::int32_t> targets) {
  const auto at = static_cast<std::size_t>(index);
  if (at < inputs.size()) inputs[at] = static_cast<std::int32_t>(token);
  if (at > 0) targets[at - 1] = static_cast<std::int32_t>(token);
}

void make_sequence(const Synthetic& source, const SequenceShape& shape, std::uint64_t key,
                   std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
  const Chain& chain = source.chain;
  const std::int64_t stride = shape.vocab / chain.states;
  std::int64_t state = static_cast<std::int64_t>(random_bits(key, 0) % static_cast<std::uint64_t>(chain.states));
  for (std::int64_t i = 0; i <= shape.seq_len; ++i) {
    write_pair(i, state * stride, inputs, targets);
    state = chain.next(state, random_bits(key, static_cast<std::uint64_t>(i + 1)));
  }
}

void read_sequence(const TokenFile& source, const SequenceShape& shape, std::int64_t window,
                   std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
  source.check_size();
  const std::int64_t first = window * shape.seq_len;
  for (std::int64_t i = 0; i <= shape.seq_len; ++i) {
    const std::int64_t token = source.token(first + i);
    if (token >= shape.vocab) {
      refuse(source.file, fmt::format("token {} at offset {} is outside the model's vocabulary of {}", token,
                                      kHeaderBytes + (first + i) * source.size_of_token(), shape.vocab));
    }
    write_pair(i, token, inputs, targets);
  }
}

}  // namespace

TokenData::TokenData(std::unique_ptr<Source> source) : source_(std::move(source)) {}
TokenData::~TokenData() = default;
TokenData::TokenData(TokenData&&) noexcept = default;
TokenData& TokenData::operator=(TokenData&&) noexcept = default;

TokenData TokenData::synthetic(const SequenceShape& shape, std::uint64_t seed) {
  check_shape(shape);
  return TokenData(std::unique_ptr<Source>(new Source{shape, seed, Synthetic{Chain(shape.vocab, seed)}}));
}

TokenData TokenData::open(const std::filesystem::path& file, const SequenceShape& shape, std::uint64_t seed) {
  check_shape(shape);
  return TokenData(std::unique_ptr<Source>(new Source{shape, seed, open_token_file(file, shape)}));
}

void TokenData::batch(std::int64_t step, std::int64_t sample, std::span<std::int32_t> inputs,
                      std::span<std::int32_t> targets) const {
  const SequenceShape& shape = source_->shape;
  const auto length = static_cast<std::size_t>(shape.seq_len);
  if (inputs.size() != length || targets.size() != length || step < 0 || sample < 0 || sample >= shape.global_batch) {
    throw std::logic_error("token data: a sequence outside the batch, or of another length");
  }
  const std::int64_t number = step * shape.global_batch + sample;
  std::visit(overloaded{[&](const Synthetic& made) {
                          const auto key = random_key(source_->seed, static_cast<std::uint64_t>(number));
                          make_sequence(made, shape, key, inputs, targets);
                        },
                        [&](const TokenFile& file) {
                          const std::int64_t epoch = number / file.windows;
                          const auto key = random_key(source_->seed, static_cast<std::uint64_t>(epoch));
                          const std::int64_t window = permuted(number % file.windows, file.windows, key);
                          read_sequence(file, shape, window, inputs, targets);
                        }},
             source_->kind);
}

std::string TokenData::fingerprint() const {
  return std::visit(overloaded{[](const Synthetic&) { return std::string("synthetic"); },
                               [](const TokenFile& file) { return file_fingerprint(file); }},
                    source_->kind);
}

std::int64_t TokenData::windows() const {
  const auto* const file = std::get_if<TokenFile>(&source_->kind);
  return file != nullptr ? file->windows : 0;
}

double TokenData::entropy() const {
  const auto* const made = std::get_if<Synthetic>(&source_->kind);
  if (made == nullptr || made->chain.states == 1) return 0;
  const auto states = static_cast<double>(made->chain.states);
  const double other = (1 - static_cast<double>(kFollowEighths) / 8) / states;
  const double follow = static_cast<double>(kFollowEighths) / 8 + other;
  return -follow * std::log(follow) - (states - 1) * other * std::log(other);
}

TokenData open_token_data(const std::string& data, const SequenceShape& shape, std::uint64_t seed) {
  return data == "synthetic" ? TokenData::synthetic(shape, seed) : TokenData::open(data, shape, seed);
}

}  // namespace zeroplan
