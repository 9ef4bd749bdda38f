// Checkpoints: what is written comes back at any rank count; what is damaged, foreign or unfinished is refused by name;
// a writer killed at any moment leaves the checkpoint before.

#include "runtime/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <regex>
#include <vector>

#include "models/error.h"
#include "models/lower.h"
#include "runtime/checkpoint_file.h"
#include "runtime/checkpoint_manifest.h"
#include "runtime/checksum.h"
#include "runtime/random.h"
#include "tests/catch.h"
#include "tests/temporary_folder.h"
#include "tests/tiny_models.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

namespace fs = std::filesystem;

Plan plan_of(const ModelSpec& model, int ranks, DType compute = DType::bf16, DType moments = DType::fp32) {
  Plan plan;
  plan.ranks = ranks;
  plan.shard_ranks = ranks;
  plan.seq_len = 16;
  plan.precision.weights = compute;
  plan.precision.states = moments;
  const int blocks = static_cast<int>(model.sequence.size());
  plan.optimizer = plan.parameters = Placement::all(Tier::hbm, blocks);
  return plan;
}

CheckpointMeta meta_of(const ModelSpec& model, const Plan& plan, std::int64_t step) {
  CheckpointMeta meta = checkpoint_meta(model, plan);
  meta.step = step;
  meta.updates = step - 1;
  meta.loss_scale = {65536.0, 17, 2, 1};
  meta.weights_seed = 0xfedcba9876543210u;
  meta.data_seed = 3;
  meta.samples = step * 8;
  meta.data = "synthetic \"data\"";
  return meta;
}

/// Three arrays of a range as bytes; every element tells which it is and of which step.
struct States {
  std::vector<float> master;
  std::vector<std::byte> first, second;
  friend bool operator==(const States& a, const States& b) {
    return std::memcmp(a.master.data(), b.master.data(), a.master.size() * 4) == 0 &&
           a.master.size() == b.master.size() && a.first == b.first && a.second == b.second;
  }
};

States states_of(const FlatRange& range, const CheckpointMeta& meta, std::int64_t stored) {
  States states;
  const int moment = size_of(meta.moments);
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    const std::uint64_t key =
        random_key(static_cast<std::uint64_t>(meta.step), static_cast<std::uint64_t>(range.block));
    const std::uint64_t bits = i < stored ? random_bits(key, static_cast<std::uint64_t>(i)) : 0;
    // Any bits: NaN, denormals and minus zero come back as well.
    states.master.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    for (int b = 0; b < moment; ++b) {
      states.first.push_back(static_cast<std::byte>(bits >> (8 * b + 32)));
      states.second.push_back(static_cast<std::byte>(bits >> (8 * b + 17)));
    }
  }
  return states;
}

States read_states(const CheckpointReader& reader, const FlatRange& range) {
  const auto count = static_cast<std::size_t>(range.count());
  const auto moment_bytes = count * static_cast<std::size_t>(size_of(reader.meta().moments));
  States states{std::vector<float>(count, 7.0f), std::vector<std::byte>(moment_bytes, std::byte{7}),
                std::vector<std::byte>(moment_bytes, std::byte{7})};
  reader.read(range, states.master, states.first, states.second);
  return states;
}

const BlockKind& kind_of(const ModelSpec& model, int block) {
  return model.kinds[static_cast<std::size_t>(model.sequence[static_cast<std::size_t>(block)])];
}

/// The ranges of a rank: its shard of every block.
std::vector<FlatRange> shards(const ModelSpec& model, DType compute, int rank, int ranks) {
  std::vector<FlatRange> ranges;
  for (int block = 0; block < static_cast<int>(model.sequence.size()); ++block) {
    const std::int64_t shard = flat_layout(kind_of(model, block), compute, ranks).shard;
    ranges.push_back({block, rank * shard, (rank + 1) * shard});
  }
  return ranges;
}

/// Saves as a job of meta.ranks ranks would.
void save(const fs::path& directory, const ModelSpec& model, const CheckpointMeta& meta, int keep = 2) {
  const std::vector<std::int64_t> stored = stored_elements(model, meta.compute);
  std::vector<std::string> files;
  for (int rank = 0; rank < meta.ranks; ++rank) {
    CheckpointWriter writer(directory, meta, model, rank);
    for (const FlatRange& range : shards(model, meta.compute, rank, meta.ranks)) {
      States states = states_of(range, meta, stored[static_cast<std::size_t>(range.block)]);
      // What lies in the padding to the shard group is not kept.
      for (std::int64_t i = range.begin; i < range.end; ++i) {
        if (i >= stored[static_cast<std::size_t>(range.block)]) {
          states.master[static_cast<std::size_t>(i - range.begin)] = 1.0f;
        }
      }
      writer.add(range, states.master, states.first, states.second);
    }
    files.push_back(writer.finish());
  }
  commit_manifest(directory, meta, model, files, keep);
}

/// Whether all states are those of meta's step.
bool holds_states(const CheckpointReader& reader, const ModelSpec& model, const CheckpointMeta& meta) {
  const std::vector<std::int64_t> stored = stored_elements(model, meta.compute);
  for (int block = 0; block < static_cast<int>(stored.size()); ++block) {
    const std::int64_t elements = stored[static_cast<std::size_t>(block)];
    const FlatRange range{block, 0, elements + 64};
    if (!(read_states(reader, range) == states_of(range, meta, elements))) return false;
  }
  return true;
}

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

std::vector<std::byte> pattern(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>((i * 131 + 17) % 251);
  return bytes;
}

}  // namespace

TEST_CASE("XXH64 and CRC-32 are those of xxhash 3.5 and zlib, in any pieces") {
  struct Case {
    std::size_t size;
    std::uint64_t plain, seeded;  // python-xxhash, seeds 0 and 2654435761
    std::uint32_t crc;            // zlib.crc32
  };
  for (const Case& c : {Case{0, 0xef46db3751d8e999u, 0xac75fda2929b17efu, 0x00000000u},
                        Case{1, 0xad10cd9780ac4ff7u, 0xf88ae2f48ef24881u, 0xb8b2cf7fu},
                        Case{3, 0x5a02e91c79974197u, 0xb8161302354a9136u, 0xe3890304u},
                        Case{4, 0xf7c8665f2b457a50u, 0x11a5ed95985df209u, 0xb53c2c42u},
                        Case{8, 0x6a262363cf59a5cbu, 0x7c8a4bec28d0d35au, 0x56879291u},
                        Case{14, 0x20491eb77b573eddu, 0xc31f9551c85f8d44u, 0xb80c4018u},
                        Case{31, 0xebc709c0ad96c271u, 0x2a161e3eacf4c811u, 0x85cf1a64u},
                        Case{32, 0xf05058c0d768f01bu, 0x7294e8011ad50a4eu, 0x5939987du},
                        Case{33, 0xa9cc955138ce2711u, 0x878c06ed9b6584fcu, 0x108c29b2u},
                        Case{64, 0xbc194183e0d80bb8u, 0xeb6e22223ca7c7e2u, 0x4507fd5du},
                        Case{222, 0x5f37dd7b93d70eb2u, 0x8814321643912ee3u, 0xb6044a7bu},
                        Case{1000, 0x2386a6b691852777u, 0x5fb9f72a968081cbu, 0x33e09db1u}}) {
    INFO(c.size << " bytes");
    const std::vector<std::byte> bytes = pattern(c.size);
    CHECK(xxh64(bytes) == c.plain);
    CHECK(xxh64(bytes, 2654435761u) == c.seeded);
    CHECK(crc32(bytes) == c.crc);
    std::mt19937 random(static_cast<unsigned>(c.size));
    for (int run = 0; run < 20; ++run) {
      Xxh64 hash;
      for (std::size_t at = 0; at < bytes.size();) {
        const std::size_t piece = std::min<std::size_t>(random() % 70, bytes.size() - at);
        hash.update(std::span(bytes).subspan(at, piece));
        at += piece;
      }
      CHECK(hash.digest() == c.plain);
    }
  }
  CHECK(checksum_text(xxh64(bytes_of_text("abc"))) == "44bc2cf5ad770999");
}

TEST_CASE("A checkpoint is read back bit for bit at any rank count and type") {
  const TemporaryFolder folder;
  const ModelSpec model = GENERATE(0, 1) == 0 ? tiny_gpt2() : tiny_llama();
  const DType compute = GENERATE(DType::bf16, DType::fp32);
  const DType moments = GENERATE(DType::fp32, DType::bf16);
  const int writers = GENERATE(1, 3, 8);
  const CheckpointMeta meta = meta_of(model, plan_of(model, writers, compute, moments), 12);
  save(folder.path(), model, meta);
  CHECK(fs::exists(folder.path() / "step-000012" / "manifest.json"));

  for (const int readers : {1, 2, 5, 8}) {
    const CheckpointReader reader(folder.path(), model, plan_of(model, readers, compute, moments));
    CHECK(reader.meta() == meta);
    CHECK(reader.notes().empty());
    CHECK(reader.path() == folder.path() / "step-000012");
    const std::vector<std::int64_t> stored = stored_elements(model, compute);
    for (int rank = 0; rank < readers; ++rank) {
      for (const FlatRange& range : shards(model, compute, rank, readers)) {
        const bool same =
            read_states(reader, range) == states_of(range, meta, stored[static_cast<std::size_t>(range.block)]);
        CHECK(same);
      }
    }
  }
}

TEST_CASE("Ranges of any size in any order are cut into chunks and found again") {
  const TemporaryFolder folder;
  // One embedding of more than two chunks.
  const ModelSpec model =
      read_model(R"({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8,
                                        "vocab_size": 20000})",
                 "wide.json");
  const Plan plan = plan_of(model, 3, DType::bf16, DType::bf16);
  const CheckpointMeta meta = meta_of(model, plan, 1);
  const std::vector<std::int64_t> stored = stored_elements(model, DType::bf16);
  REQUIRE(stored[0] > 2 * kChunkElements);
  std::mt19937 random(4);
  std::vector<FlatRange> ranges;
  for (int block = 0; block < static_cast<int>(stored.size()); ++block) {
    const std::int64_t end = stored[static_cast<std::size_t>(block)];
    for (std::int64_t at = 0; at < end;) {
      const std::int64_t next = at + 1 + static_cast<std::int64_t>(random() % (block == 0 ? 200000 : 500));
      ranges.push_back({block, at, next});  // the last one ends beyond
      at = next;
    }
  }
  std::shuffle(ranges.begin(), ranges.end(), random);
  std::vector<std::string> files;
  for (int rank = 0; rank < 3; ++rank) {  // the last one, a replica, stores nothing
    CheckpointWriter writer(folder.path(), meta, model, rank);
    for (std::size_t i = static_cast<std::size_t>(rank); rank < 2 && i < ranges.size(); i += 2) {
      const States s = states_of(ranges[i], meta, stored[static_cast<std::size_t>(ranges[i].block)]);
      writer.add(ranges[i], s.master, s.first, s.second);
    }
    files.push_back(writer.finish());
  }
  commit_manifest(folder.path(), meta, model, files);
  const CheckpointReader reader(folder.path(), model, plan);
  CHECK(holds_states(reader, model, meta));
  for (int i = 0; i < 40; ++i) {
    const std::int64_t begin = static_cast<std::int64_t>(random()) % stored[0];
    const FlatRange range{0, begin, begin + static_cast<std::int64_t>(random() % 150000)};
    const bool same = read_states(reader, range) == states_of(range, meta, stored[0]);
    CHECK(same);
  }
  // An array left out.
  std::vector<float> master(100);
  reader.read({0, 50, 150}, master, {}, {});
  const States expected = states_of({0, 50, 150}, meta, stored[0]);
  CHECK(std::memcmp(master.data(), expected.master.data(), 400) == 0);
  CHECK_THROWS_AS(reader.read({0, 0, 99}, master, {}, {}), std::logic_error);
}

TEST_CASE("States that no rank stores, or two, are our own error") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_llama();
  const CheckpointMeta meta = meta_of(model, plan_of(model, 1), 1);
  const std::vector<std::int64_t> stored = stored_elements(model, meta.compute);
  const auto save_but = [&](int block, std::int64_t cut_begin, std::int64_t cut_end) {
    CheckpointWriter writer(folder.path(), meta, model, 0);
    for (int b = 0; b < static_cast<int>(stored.size()); ++b) {
      FlatRange range{b, 0, stored[static_cast<std::size_t>(b)]};
      if (b == block) range = {b, cut_begin, range.end - cut_end};
      const States s = states_of(range, meta, 1 << 20);
      writer.add(range, s.master, s.first, s.second);
      if (b == block && cut_begin < 0) writer.add(range, s.master, s.first, s.second);
    }
    const std::vector<std::string> files = {writer.finish()};
    commit_manifest(folder.path(), meta, model, files);
  };
  CHECK_THROWS_AS(save_but(1, 5, 0), std::logic_error);
  CHECK_THROWS_AS(save_but(0, 0, 1), std::logic_error);
  CHECK_FALSE(has_valid_manifest(folder.path() / "step-000001"));
  CHECK_NOTHROW(save_but(-1, 0, 0));
  CHECK_THROWS_WITH(CheckpointWriter(folder.path(), meta, model, 0), HasText("there is a checkpoint already"));
}

TEST_CASE("The newest finished checkpoint is taken, and newer folders are named") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_llama();
  const Plan plan = plan_of(model, 2);
  CHECK_THAT(message_of([&] { CheckpointReader(folder.path(), model, plan); }), HasText("holds no checkpoint"));
  CHECK_THAT(message_of([&] { CheckpointReader(folder / "none", model, plan); }), HasText("No such file"));
  for (const std::int64_t step : {5, 10, 15}) save(folder.path(), model, meta_of(model, plan, step), 10);
  CHECK(CheckpointReader(folder.path(), model, plan).meta().step == 15);
  CHECK(CheckpointReader(folder.path() / "step-000010", model, plan).meta().step == 10);
  CHECK(CheckpointReader(folder.path() / "step-000010/", model, plan).meta().step == 10);

  fs::remove(folder.path() / "step-000015" / "manifest.json");
  fs::create_directory(folder.path() / "step-000020");
  const CheckpointReader reader(folder.path(), model, plan);
  CHECK(reader.meta().step == 10);
  REQUIRE(reader.notes().size() == 2);
  CHECK_THAT(reader.notes()[0], HasText("step-000020: no manifest.json: it was not finished"));
  CHECK_THAT(reader.notes()[1], HasText("step-000015: no manifest.json"));
  CHECK_THAT(message_of([&] { CheckpointReader(folder.path() / "step-000015", model, plan); }),
             HasText("not finished"));

  // A finished manifest of another folder.
  fs::copy_file(folder.path() / "step-000005/manifest.json", folder.path() / "step-000015/manifest.json");
  CHECK_THAT(
      message_of([&] { CheckpointReader(folder.path(), model, plan); }),
      HasText("its manifest is of step 5\nthe checkpoint before it is " + (folder.path() / "step-000010").string()));
}

TEST_CASE("Any flipped byte and any truncation is found, and the checkpoint before it is named") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_llama();
  const Plan plan = plan_of(model, 2);
  save(folder.path(), model, meta_of(model, plan, 1));
  const CheckpointMeta meta = meta_of(model, plan, 2);
  save(folder.path(), model, meta);
  const fs::path newest = folder.path() / "step-000002";
  const auto outcome = [&]() -> std::string {
    return message_of([&] {
      const CheckpointReader reader(folder.path(), model, plan);
      if (reader.meta().step == 1) throw InputError("older: " + reader.notes().at(0));
      if (!holds_states(reader, model, meta)) FAIL("other states were read");
    });
  };
  REQUIRE(outcome() == "accepted");
  std::mt19937 random(6);
  for (const std::string name : {"rank-00000.zpc", "rank-00001.zpc", "manifest.json"}) {
    const fs::path file = newest / name;
    const std::string good = bytes_of_file(file);
    std::vector<std::size_t> places = {0, 9, 17, 25, 31, good.size() - 1, good.size() - 9, good.size() - 24};
    for (int i = 0; i < 40; ++i) places.push_back(random() % good.size());
    for (const std::size_t place : places) {
      std::string bad = good;
      bad[place] = static_cast<char>(bad[place] ^ (1 << random() % 8));
      write_bytes(file, bad);
      INFO(name << " at " << place);
      const std::string message = outcome();
      CHECK_THAT(message, HasText(name));
      if (name == "manifest.json") {
        CHECK_THAT(message, HasText("older: "));
      } else {
        const bool described = std::regex_search(message, std::regex("expected (checksum )?[0-9a-f\"]|damaged footer"));
        INFO(message);
        CHECK(described);
      }
    }
    for (const std::size_t length : {std::size_t{0}, std::size_t{20}, good.size() / 2, good.size() - 1}) {
      write_bytes(file, good.substr(0, length));
      INFO(name << " cut to " << length);
      CHECK_THAT(outcome(), HasText(name == "manifest.json" ? "older: "
                                                            : "truncated: expected " + std::to_string(good.size()) +
                                                                  " bytes, found " + std::to_string(length)));
    }
    if (name != "manifest.json") {
      write_bytes(file, good + "x");
      CHECK_THAT(outcome(), HasText("longer than the manifest says"));
      fs::remove(file);
      CHECK_THAT(outcome(), HasText("the checkpoint before it is " + (folder.path() / "step-000001").string()));
    }
    write_bytes(file, good);
  }
  CHECK(outcome() == "accepted");
  // A rank's file of another checkpoint, whole in itself.
  fs::copy_file(folder.path() / "step-000001/rank-00001.zpc", newest / "rank-00001.zpc",
                fs::copy_options::overwrite_existing);
  CHECK_THAT(outcome(), HasText("rank-00001.zpc: header or index"));
}

TEST_CASE("Another model, compute type or moment type is refused, naming both") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_llama();
  save(folder.path(), model, meta_of(model, plan_of(model, 2), 3));
  const ModelSpec other = tiny_llama(R"(, "rope_theta": 500000.0)");
  CHECK_THAT(message_of([&] { CheckpointReader(folder.path(), other, plan_of(other, 2)); }),
             HasText("rope_theta is missing there and 500000 here"));
  const ModelSpec gpt2 = tiny_gpt2();
  CHECK_THAT(message_of([&] { CheckpointReader(folder.path(), gpt2, plan_of(gpt2, 2)); }),
             HasText("is of model llama, expected gpt2: model_type is \"llama\" there and \"gpt2\" here"));
  CHECK_THAT(message_of([&] { CheckpointReader(folder.path(), model, plan_of(model, 2, DType::fp16)); }),
             HasText("weights are bf16 there and fp16 in the plan"));
  CHECK_THAT(message_of([&] { CheckpointReader(folder.path(), model, plan_of(model, 2, DType::bf16, DType::bf16)); }),
             HasText("optimizer states are fp32 there and bf16 in the plan"));
}

TEST_CASE("Old checkpoints and unfinished folders go once a new one stands; what is not ours stays") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_llama();
  const Plan plan = plan_of(model, 1);
  for (const std::int64_t step : {1, 2}) save(folder.path(), model, meta_of(model, plan, step));
  fs::create_directory(folder.path() / "step-000003");
  write_bytes(folder.path() / "step-000003/rank-00000.zpc.tmp", "left by a kill");
  fs::create_directory(folder.path() / "step-000009");  // newer than what follows
  write_bytes(folder.path() / "step-000001/notes.txt", "mine");
  fs::create_directory(folder.path() / "step-000004");
  write_bytes(folder.path() / "step-000004/rank-00007.zpc", "of a larger world");
  write_bytes(folder.path() / "readme", "mine");
  save(folder.path(), model, meta_of(model, plan, 4));
  CHECK(bytes_of_file(folder.path() / "step-000001/notes.txt") == "mine");
  CHECK_FALSE(fs::exists(folder.path() / "step-000001/manifest.json"));
  CHECK_FALSE(fs::exists(folder.path() / "step-000001/rank-00000.zpc"));
  CHECK(has_valid_manifest(folder.path() / "step-000002"));
  CHECK_FALSE(fs::exists(folder.path() / "step-000003"));
  CHECK(has_valid_manifest(folder.path() / "step-000004"));
  CHECK_FALSE(fs::exists(folder.path() / "step-000004/rank-00007.zpc"));
  CHECK(fs::exists(folder.path() / "step-000009"));
  CHECK(fs::exists(folder.path() / "readme"));
  save(folder.path(), model, meta_of(model, plan, 5), 1);
  CHECK_FALSE(fs::exists(folder.path() / "step-000004"));
  CHECK_FALSE(fs::exists(folder.path() / "step-000002"));
}

TEST_CASE("A run is not started where it would come to overwrite a checkpoint, or cannot write") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_llama();
  const fs::path directory = folder.path() / "deep" / "er";
  check_checkpoint_directory(directory, 0);
  CHECK(fs::is_empty(directory));
  save(directory, model, meta_of(model, plan_of(model, 1), 10));
  fs::create_directory(directory / "step-000099");  // unfinished: no matter
  CHECK_NOTHROW(check_checkpoint_directory(directory, 10));
  CHECK_THROWS_WITH(check_checkpoint_directory(directory, 0),
                    HasText("holds a checkpoint of step 10, and this run starts after step 0"));
  write_bytes(folder / "file", "x");
  CHECK_THROWS_AS(check_checkpoint_directory(folder / "file", 0), InputError);
  CHECK_THROWS_AS(check_checkpoint_directory(folder.path() / "file" / "below", 0), InputError);
  CHECK_THROWS_WITH(check_checkpoint_directory("/proc/zeroplan", 0), HasText("/proc/zeroplan: mkdir: "));
  CHECK_THROWS_AS(check_checkpoint_directory("/proc/zeroplan", 0), DeviceError);
  CHECK_THROWS_AS(check_checkpoint_directory("/proc", 0), DeviceError);
}

TEST_CASE("A full disk is a named error that leaves the checkpoint before") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_llama();
  const Plan plan = plan_of(model, 1);
  save(folder.path(), model, meta_of(model, plan, 1));
  // The limit on a file's size stands for the disk: it needs no privileges.
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100000, 100000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      save(folder.path(), model, meta_of(model, plan, 2));
    } catch (const DeviceError& error) {
      const std::string message = error.what();
      const bool named = message.find("step-000002/rank-00000.zpc.tmp: write: File too large") != std::string::npos;
      ::_exit(named ? 3 : 1);
    }
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
  const CheckpointReader reader(folder.path(), model, plan);
  CHECK(reader.meta().step == 1);
  CHECK(reader.notes().size() == 1);
  CHECK_FALSE(fs::exists(folder.path() / "step-000002/rank-00000.zpc.tmp"));
}

TEST_CASE("A writer killed at any moment leaves a checkpoint at least as new as the last finished one") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_llama();
  const Plan plan = plan_of(model, 2);
  std::mt19937 random(static_cast<unsigned>(::getpid()));  // other moments in every run
  const auto before = std::chrono::steady_clock::now();
  save(folder.path(), model, meta_of(model, plan, 1));
  const std::chrono::duration<double, std::micro> one = std::chrono::steady_clock::now() - before;
  double longest = 4 * one.count();
  std::int64_t finished = 1;
  int midway = 0;
  // A busy machine lets most children do nothing in that time: more kills then, later ones.
  for (int kill = 0; kill < 60 || (kill < 2000 && (finished <= 10 || midway == 0)); ++kill) {
    int pipe[2];
    REQUIRE(::pipe(pipe) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      for (std::int64_t step = finished + 1;; ++step) {
        try {
          save(folder.path(), model, meta_of(model, plan, step));
        } catch (...) {
          ::_exit(1);
        }
        if (::write(pipe[1], &step, sizeof(step)) != sizeof(step)) ::_exit(1);
      }
    }
    ::close(pipe[1]);
    ::usleep(static_cast<useconds_t>(std::uniform_real_distribution<double>(0, longest)(random)));
    REQUIRE(::kill(child, SIGKILL) == 0);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
    std::int64_t said = finished;
    while (::read(pipe[0], &said, sizeof(said)) == sizeof(said)) {
    }
    ::close(pipe[0]);
    const CheckpointReader reader(folder.path(), model, plan);
    const std::int64_t found = reader.meta().step;
    CHECK((found == said || found == said + 1));
    CHECK(reader.meta() == meta_of(model, plan, found));
    CHECK(holds_states(reader, model, meta_of(model, plan, found)));
    if (!reader.notes().empty()) ++midway;
    if (found == finished) longest = std::min(1.1 * longest, 1e5);
    finished = found;
  }
  CHECK(finished > 10);
  CHECK(midway > 0);  // some kills did hit a half-written one
}
