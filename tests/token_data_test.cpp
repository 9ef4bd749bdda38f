// Token files and made-up sequences: order, errors, what examples/make_tokens.py writes.

#include "runtime/token_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "models/error.h"
#include "runtime/checksum.h"
#include "tests/catch.h"
#include "tests/temporary_folder.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

struct FileFields {
  std::string magic = "ZPTOKENS";
  std::uint32_t version = 1, bytes_per_token = 2;
  std::uint64_t vocab = 100, count = 0;
  std::uint32_t reserved = 0;
};

template <class T>
void append(std::string& bytes, T value) {
  char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  bytes.append(raw, sizeof(T));
}

std::string token_file(FileFields fields, const std::vector<std::uint32_t>& tokens) {
  std::string bytes = fields.magic;
  append(bytes, fields.version);
  append(bytes, fields.bytes_per_token);
  append(bytes, fields.vocab);
  append(bytes, fields.count != 0 ? fields.count : static_cast<std::uint64_t>(tokens.size()));
  append(bytes, fields.reserved);
  append(bytes, crc32(std::as_bytes(std::span(bytes))));
  for (const std::uint32_t token : tokens) {
    if (fields.bytes_per_token == 2) {
      append(bytes, static_cast<std::uint16_t>(token));
    } else {
      append(bytes, token);
    }
  }
  return bytes;
}

std::vector<std::uint32_t> counting(std::uint32_t count) {
  std::vector<std::uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0u);
  return tokens;
}

struct Sequence {
  std::vector<std::int32_t> inputs, targets;
};
Sequence read(const TokenData& data, std::int64_t seq_len, std::int64_t step, std::int64_t sample) {
  Sequence sequence{std::vector<std::int32_t>(static_cast<std::size_t>(seq_len)),
                    std::vector<std::int32_t>(static_cast<std::size_t>(seq_len))};
  data.batch(step, sample, sequence.inputs, sequence.targets);
  return sequence;
}

}  // namespace

TEST_CASE("A permutation of windows visits each once, and another key gives another order") {
  for (const std::int64_t count : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 300, 1000}) {
    std::set<std::int64_t> seen;
    std::vector<std::int64_t> first, second;
    for (std::int64_t i = 0; i < count; ++i) {
      first.push_back(permuted(i, count, 1));
      second.push_back(permuted(i, count, 2));
      seen.insert(first.back());
    }
    CHECK(std::ssize(seen) == count);
    CHECK((*seen.begin() == 0 && *seen.rbegin() == count - 1));
    if (count > 10) CHECK(first != second);
  }
  CHECK(permuted(0, std::int64_t{1} << 62, 3) >= 0);
  CHECK_THROWS_AS(permuted(5, 5, 1), std::logic_error);
}

TEST_CASE("The order of windows is near to uniform") {
  // Position of window 0 over many keys: each of 10 positions about 1,000 times (5 standard deviations: 150).
  std::vector<int> where(10);
  for (std::uint64_t key = 0; key < 10000; ++key) ++where[static_cast<std::size_t>(permuted(0, 10, key))];
  for (const int times : where) CHECK(std::abs(times - 1000) < 150);
}

TEST_CASE("Each epoch of a file visits every window once, and targets are the next tokens") {
  const TemporaryFolder folder;
  const std::uint32_t width = GENERATE(2u, 4u);
  FileFields fields;
  fields.vocab = 5000;
  fields.bytes_per_token = width;
  write_bytes(folder / "t", token_file(fields, counting(403)));
  const SequenceShape shape{10, 8, 5000};
  const TokenData data = TokenData::open(folder / "t", shape, 7);
  REQUIRE(data.windows() == 40);
  std::map<std::int32_t, int> starts;
  std::vector<std::int32_t> order;
  for (std::int64_t n = 0; n < 3 * 40; ++n) {
    const Sequence s = read(data, 10, n / 8, n % 8);
    REQUIRE(s.inputs.front() % 10 == 0);
    for (std::size_t i = 0; i < 10; ++i) {
      REQUIRE(s.inputs[i] == s.inputs.front() + static_cast<std::int32_t>(i));
      REQUIRE(s.targets[i] == s.inputs[i] + 1);
    }
    order.push_back(s.inputs.front());
    ++starts[order.back()];
    if ((n + 1) % 40 == 0) {
      CHECK(starts.size() == 40);
      for (const auto& [start, times] : starts) CHECK(times == (n + 1) / 40);
    }
  }
  CHECK(!std::equal(order.begin(), order.begin() + 40, order.begin() + 40));
  CHECK(!std::is_sorted(order.begin(), order.begin() + 40));
  // A reader made anew, as after a resume, goes on in the same order.
  const TokenData again = TokenData::open(folder / "t", shape, 7);
  for (std::int64_t n = 57; n < 100; ++n) {
    CHECK(read(again, 10, n / 8, n % 8).inputs.front() == order[static_cast<std::size_t>(n)]);
  }
  CHECK(read(TokenData::open(folder / "t", shape, 8), 10, 0, 0).inputs.front() +
            read(TokenData::open(folder / "t", shape, 8), 10, 0, 1).inputs.front() * 1000 !=
        order[0] + order[1] * 1000);
}

TEST_CASE("The sequences of a step do not depend on ranks, micro-batch and accumulation") {
  for (const int ranks : {1, 2, 3, 4, 6}) {
    for (const std::int64_t micro_batch : {1, 2}) {
      const std::int64_t accumulation = 24 / (ranks * micro_batch);
      std::set<std::int64_t> samples;
      for (std::int64_t m = 0; m < accumulation; ++m) {
        for (std::int64_t row = 0; row < micro_batch; ++row) {
          for (int rank = 0; rank < ranks; ++rank) samples.insert(sample_in_batch(m, micro_batch, row, rank, ranks));
        }
      }
      CHECK(samples.size() == 24);
      CHECK((*samples.begin() == 0 && *samples.rbegin() == 23));
    }
  }
  STATIC_REQUIRE(sample_in_batch(3, 1, 0, 1, 4) == 13);  // 13 / 4 = micro-step 3, 13 % 4 = rank 1
}

TEST_CASE("Made-up sequences follow their chain and have the entropy they say") {
  const std::int64_t vocab = GENERATE(as<std::int64_t>(), 1, 2, 3, 50, 64, 512, 50257);
  const SequenceShape shape{1000, 4, vocab};
  const TokenData data = TokenData::synthetic(shape, 11);
  std::map<std::int32_t, double> singles;
  std::map<std::pair<std::int32_t, std::int32_t>, double> pairs;
  double total = 0;
  for (std::int64_t n = 0; n < 400; ++n) {
    const Sequence s = read(data, 1000, n / 4, n % 4);
    CHECK(std::equal(s.inputs.begin() + 1, s.inputs.end(), s.targets.begin()));
    for (std::size_t i = 0; i < s.inputs.size(); ++i) {
      REQUIRE((s.inputs[i] >= 0 && s.inputs[i] < vocab));
      ++singles[s.inputs[i]];
      ++pairs[{s.inputs[i], s.targets[i]}];
      ++total;
    }
  }
  CHECK(std::ssize(singles) == std::min<std::int64_t>(vocab, 64));
  double entropy = 0;  // of the next token given this one, as counted
  for (const auto& [pair, count] : pairs) entropy -= count / total * std::log(count / singles[pair.first]);
  // Counts underestimate by about (pairs - singles) / (2 total): 0.005.
  CHECK_THAT(entropy, WithinAbs(data.entropy(), 0.012));
  CHECK(data.entropy() <= 0.75 * std::log(static_cast<double>(std::min<std::int64_t>(vocab, 64))) + 1e-12);
  CHECK(data.fingerprint() == "synthetic");
}

TEST_CASE("Made-up sequences are a function of seed, step and sample") {
  const SequenceShape shape{64, 4, 512};
  const TokenData data = TokenData::synthetic(shape, 1);
  CHECK(read(data, 64, 3, 2).inputs == read(TokenData::synthetic(shape, 1), 64, 3, 2).inputs);
  CHECK(read(data, 64, 3, 2).inputs != read(data, 64, 3, 1).inputs);
  CHECK(read(data, 64, 3, 2).inputs != read(data, 64, 2, 2).inputs);
  CHECK(read(data, 64, 3, 2).inputs != read(TokenData::synthetic(shape, 2), 64, 3, 2).inputs);
  // Step x batch + sample counts: the same sequence under another batch size.
  CHECK(read(data, 64, 3, 2).inputs == read(TokenData::synthetic({64, 7, 512}, 1), 64, 2, 0).inputs);
}

TEST_CASE("A wrong token file is refused with its name and what is wrong") {
  const TemporaryFolder folder;
  const auto file = folder / "data.tokens";
  const SequenceShape shape{10, 1, 100};
  const auto message = [&](const std::string& bytes) -> std::string {
    write_bytes(file, bytes);
    try {
      TokenData::open(file, shape, 1);
    } catch (const InputError& error) {
      return error.what();
    }
    return "accepted";
  };
  const std::string good = token_file({}, counting(50));
  CHECK(message(good) == "accepted");
  CHECK_THAT(message(""), HasText("data.tokens: expected a token file with a header of 40 bytes, found 0"));
  CHECK_THAT(message(good.substr(0, 39)), HasText("found 39 bytes"));
  CHECK_THAT(message("# Title" + good), HasText("expected a token file"));
  CHECK_THAT(message(good.substr(0, good.size() - 1)), HasText("truncated: expected 50 tokens of 2 bytes"));
  CHECK_THAT(message(good + "ab"), HasText("longer than it says"));
  CHECK_THAT(message(good + "a"), HasText("longer than it says"));
  FileFields fields;
  fields.version = 2;
  CHECK_THAT(message(token_file(fields, counting(50))), HasText("expected version 1 at offset 8, found 2"));
  fields = {};
  fields.bytes_per_token = 3;
  CHECK_THAT(message(token_file(fields, {})), HasText("expected 2 or 4 bytes a token"));
  fields = {};
  fields.reserved = 1;
  CHECK_THAT(message(token_file(fields, counting(50))), HasText("expected 0 at offset 32"));
  fields = {};
  fields.vocab = 101;
  CHECK_THAT(message(token_file(fields, counting(50))), HasText("vocabulary of 101 is larger than the model's of 100"));
  fields = {};
  fields.count = ~std::uint64_t{0};
  CHECK_THAT(message(token_file(fields, counting(50))), HasText("truncated"));
  fields.count = std::uint64_t{1} << 63;
  CHECK_THAT(message(token_file(fields, counting(50))), HasText("truncated"));
  CHECK_THAT(message(token_file({}, counting(10))), HasText("expected at least 11 tokens"));
  CHECK(message(token_file({}, counting(11))) == "accepted");
  for (std::size_t byte = 0; byte < 40; ++byte) {
    std::string damaged = good;
    damaged[byte] = static_cast<char>(damaged[byte] ^ 0x10);
    INFO("byte " << byte);
    CHECK_THAT(message(damaged), HasText(byte < 8 ? "expected a token file" : "damaged header: expected checksum"));
  }
  CHECK_THROWS_WITH(TokenData::open(folder / "none", shape, 1), HasText("No such file"));
  CHECK_THROWS_WITH(TokenData::open(folder.path(), shape, 1), HasText("expected a regular file"));
  CHECK_THROWS_AS(TokenData::open("/dev/zero", shape, 1), InputError);
  CHECK_THROWS_AS(TokenData::synthetic({10, 1, 0}, 1), InputError);
}

TEST_CASE("A token outside the vocabulary and a file cut short while in use are named when read") {
  const TemporaryFolder folder;
  const auto file = folder / "data.tokens";
  std::vector<std::uint32_t> tokens(50, 1);
  tokens[37] = 100;
  write_bytes(file, token_file({}, tokens));
  const TokenData data = TokenData::open(file, {10, 1, 100}, 1);
  int refused = 0;
  for (std::int64_t step = 0; step < 4; ++step) {
    try {
      read(data, 10, step, 0);
    } catch (const InputError& error) {
      ++refused;
      // 40 + 37 x 2
      CHECK_THAT(error.what(), HasText("token 100 at offset 114 is outside the model's vocabulary of 100"));
    }
  }
  CHECK(refused == 1);
  std::filesystem::resize_file(file, 60);
  CHECK_THROWS_WITH(read(data, 10, 0, 0), HasText("truncated while in use: expected 140 bytes, found 60"));
}

TEST_CASE("examples/make_tokens.py writes files that are read back byte for byte") {
  const TemporaryFolder folder;
  std::string text(3000, ' ');
  std::mt19937 random(1);
  for (char& c : text) c = static_cast<char>(random());
  write_bytes(folder / "a.txt", text.substr(0, 1234));
  write_bytes(folder / "b.txt", text.substr(1234));
  const int vocab = GENERATE(256, 300, 70000);
  const std::string out = (folder / "out.tokens").string();
  const std::string command =
      fmt::format("python3 '{}/examples/make_tokens.py' '{}' '{}' --out '{}' --vocab {} >/dev/null",
                  ZEROPLAN_SOURCE_DIR, (folder / "a.txt").string(), (folder / "b.txt").string(), out, vocab);
  REQUIRE(std::system(command.c_str()) == 0);
  CHECK(std::filesystem::file_size(out) == 40u + 3000u * (vocab > 65536 ? 4 : 2));
  const TokenData data = TokenData::open(out, {2999, 1, vocab}, 1);
  const Sequence s = read(data, 2999, 0, 0);
  for (std::size_t i = 0; i < 2999; ++i) REQUIRE(s.inputs[i] == static_cast<unsigned char>(text[i]));
  CHECK(s.targets.back() == static_cast<unsigned char>(text[2999]));
  CHECK_THAT(data.fingerprint(), HasText(fmt::format("file of 3000 tokens, vocabulary {}, checksum ", vocab)));
  CHECK_THROWS_WITH(TokenData::open(out, {2999, 1, vocab - 1}, 1), HasText("larger than the model's"));
  // A missing text: no output, nothing left behind.
  REQUIRE(std::system(fmt::format("python3 '{}/examples/make_tokens.py' '{}/none' --out '{}/no.tokens' >/dev/null 2>&1",
                                  ZEROPLAN_SOURCE_DIR, folder.path().string(), folder.path().string())
                          .c_str()) != 0);
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 3);
}
