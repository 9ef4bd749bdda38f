#pragma once
// What a model is trained on: sequences of token ids from a file (docs/files.md, "Token files") or made up. The order
// is a function of seed and sequence number alone: nothing is stored, and a resumed run goes on exactly where it was,
// on any number of ranks.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace zeroplan {

/// Number of a sequence inside the global batch of its step: row `row` of micro-step `micro_step` on `rank`. With one
/// row, sequence j goes to micro-step j / ranks, rank j % ranks. The sequences of a step do not depend on ranks.
constexpr std::int64_t sample_in_batch(std::int64_t micro_step, std::int64_t micro_batch, std::int64_t row, int rank,
                                       int ranks) {
  return (micro_step * micro_batch + row) * ranks + rank;
}

/// What sequences are asked for.
struct SequenceShape {
  std::int64_t seq_len = 1;       // tokens the model sees; a sequence has one more, the last target
  std::int64_t global_batch = 1;  // sequences a step, over all ranks and micro-steps
  std::int64_t vocab = 0;         // rows of the model's embedding
};

/// Thread-safe: batch() is const and keeps no state.
class TokenData {
 public:
  /// Made-up sequences that a model can learn. min(vocab, 64) token ids are used, spread over the vocabulary, as the
  /// states of a Markov chain: the next state is (a s + c) mod states with probability 7/8, else any state; a and c
  /// come from the seed. A model that only learns which ids occur reaches ln(states); one that learns the chain
  /// entropy(). There are no epochs: no sequence comes twice.
  static TokenData synthetic(const SequenceShape& shape, std::uint64_t seed);

  /// Maps a token file. Sequences are the windows [w seq_len, (w + 1) seq_len] of the file; each epoch visits all of
  /// them once, in an order of its own. Throws InputError naming the file and what is wrong: not a token file,
  /// truncated, longer than it says, damaged header, a vocabulary larger than the model's, fewer than seq_len + 1
  /// tokens.
  static TokenData open(const std::filesystem::path& file, const SequenceShape& shape, std::uint64_t seed);

  ~TokenData();
  TokenData(TokenData&&) noexcept;
  TokenData& operator=(TokenData&&) noexcept;

  /// Sequence `sample` (in [0, global_batch)) of step `step` (from 0): inputs [seq_len], and targets [seq_len], the
  /// token after each input. Throws InputError with the file's offset for a token outside the model's vocabulary, or
  /// when the file was truncated meanwhile.
  void batch(std::int64_t step, std::int64_t sample, std::span<std::int32_t> inputs,
             std::span<std::int32_t> targets) const;

  /// Which data this is, for a checkpoint to compare: "synthetic" or "file of N tokens, vocabulary V, checksum C" (the
  /// checksum of all tokens of a file up to 64 MiB, else of its first and last 32 MiB). Not the path: files move.
  std::string fingerprint() const;
  /// Windows of the file, 0 for synthetic data.
  std::int64_t windows() const;
  /// Synthetic data: nats a token that no model can go below on average. 0 for files.
  double entropy() const;

  struct Source;

 private:
  explicit TokenData(std::unique_ptr<Source> source);
  std::unique_ptr<Source> source_;
};

/// `data` as the user typed it: "synthetic" or a path.
TokenData open_token_data(const std::string& data, const SequenceShape& shape, std::uint64_t seed);

/// A permutation of [0, count): the image of `index`. Different keys give different orders. A Feistel network of four
/// rounds over the next even power of two, walked until the value is inside (Black & Rogaway, "Ciphers with Arbitrary
/// Finite Domains", 2002).
std::int64_t permuted(std::int64_t index, std::int64_t count, std::uint64_t key);

}  // namespace zeroplan
