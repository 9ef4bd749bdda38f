// Safetensors files: strict reading, and weights in Hugging Face's names and orientation, out and back.

#include "runtime/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "models/error.h"
#include "models/lower.h"
#include "runtime/adam.h"
#include "runtime/export_weights.h"
#include "runtime/initial_weights.h"
#include "runtime/kernels/kernels.h"
#include "runtime/numeric.h"
#include "tests/catch.h"
#include "tests/temporary_folder.h"
#include "tests/tiny_models.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

namespace fs = std::filesystem;

std::string safetensors(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + data;
}

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

const BlockKind& kind_of(const ModelSpec& model, int block) {
  return model.kinds[static_cast<std::size_t>(model.sequence[static_cast<std::size_t>(block)])];
}
int blocks_of(const ModelSpec& model) { return static_cast<int>(model.sequence.size()); }

/// A block's initial weights as the flat buffer of a rank: `type` elements, padded to 4 ranks.
template <class T>
std::vector<T> flat_weights(const ModelSpec& model, int block, DType type) {
  std::vector<float> values(static_cast<std::size_t>(flat_layout(kind_of(model, block), type, 4).padded));
  InitialWeights(model, 3).fill_flat(block, type, 0, std::ssize(values), values);
  std::vector<T> flat;
  for (const float x : values) flat.push_back(narrow<T>(x));
  return flat;
}

template <class T>
void export_initial(const ModelSpec& model, DType type, DType stored, const fs::path& directory,
                    std::int64_t max_file_bytes = kMaxWeightFileBytes) {
  WeightExporter exporter(model, stored, directory, max_file_bytes);
  for (int block = 0; block < blocks_of(model); ++block) {
    exporter.add_block(type, std::as_bytes(std::span<const T>(flat_weights<T>(model, block, type))));
  }
  exporter.finish();
}

template <class T>
std::vector<T> values_of(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry* const entry = file.find(name);
  REQUIRE(entry != nullptr);
  std::vector<T> values(static_cast<std::size_t>(entry->end - entry->begin) / sizeof(T));
  file.read(*entry, 0, std::as_writable_bytes(std::span(values)));
  return values;
}

}  // namespace

TEST_CASE("A safetensors file is written as the format says and read back") {
  const TemporaryFolder folder;
  const fs::path path = folder / "t.safetensors";
  {
    SafetensorsWriter writer(
        path, {{"a\"quoted", DType::bf16, {2, 3}}, {"scalar", DType::fp32, {}}, {"none", DType::i64, {0, 4}}});
    const std::vector<std::uint16_t> a = {1, 2, 3, 4, 5, 6};
    CHECK_THROWS_AS(writer.add(std::as_bytes(std::span(a).first(5))), std::logic_error);
    writer.add(std::as_bytes(std::span(a)));
    CHECK_THROWS_AS(writer.finish(), std::logic_error);
    const float scalar = 2.5f;
    writer.add(std::as_bytes(std::span(&scalar, 1)));
    writer.add({});
    CHECK_FALSE(fs::exists(path));
    writer.finish();
  }
  const std::string bytes = bytes_of_file(path);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  CHECK(length % 8 == 0);
  const auto header = nlohmann::json::parse(bytes.substr(8, length));
  CHECK(header == nlohmann::json::parse(R"({"__metadata__": {"format": "pt"},
      "a\"quoted": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
      "scalar": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
      "none": {"dtype": "I64", "shape": [0, 4], "data_offsets": [16, 16]}})"));
  CHECK(bytes.size() == 8 + length + 16);

  const SafetensorsFile file(path);
  CHECK(file.metadata().at("format") == "pt");
  CHECK(file.entries().size() == 3);
  CHECK(values_of<std::uint16_t>(file, "a\"quoted") == std::vector<std::uint16_t>{1, 2, 3, 4, 5, 6});
  CHECK(values_of<float>(file, "scalar") == std::vector<float>{2.5f});
  CHECK(file.find("b") == nullptr);
  std::uint16_t third = 0;
  file.read(*file.find("a\"quoted"), 4, std::as_writable_bytes(std::span(&third, 1)));
  CHECK(third == 3);
}

TEST_CASE("A writer that does not finish leaves nothing") {
  const TemporaryFolder folder;
  { const SafetensorsWriter writer(folder / "t.safetensors", {{"a", DType::bf16, {2}}}); }
  CHECK(fs::is_empty(folder.path()));
  CHECK_THROWS_AS(SafetensorsWriter(folder.path() / "none" / "t", {}), DeviceError);
}

TEST_CASE("A wrong safetensors file is refused with its name and what is wrong") {
  const TemporaryFolder folder;
  const fs::path path = folder / "t.safetensors";
  const auto message = [&](const std::string& bytes) {
    write_bytes(path, bytes);
    return message_of([&] { SafetensorsFile file(path); });
  };
  const auto with_tensor = [&](const std::string& tensor, const std::string& data) {
    return message(safetensors(R"({"x":)" + tensor + "}", data));
  };
  CHECK(with_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", "12345678") == "accepted");
  CHECK(message(safetensors("{}  ", "")) == "accepted");
  CHECK_THAT(message(""), HasText("t.safetensors: expected a safetensors file, found 0 bytes"));
  CHECK_THAT(message("1234567"), HasText("found 7 bytes"));
  CHECK_THAT(message(std::string(8, '\xff')), HasText("a header of 18446744073709551615 bytes"));
  CHECK_THAT(message(safetensors("{}", "").substr(0, 9)), HasText("a header of 2 bytes, after them are 1"));
  CHECK_THAT(message(safetensors("[]", "")), HasText("its header is no JSON object"));
  CHECK_THAT(message(safetensors("{\"x\":", "")), HasText("t.safetensors:1"));
  CHECK_THAT(message(safetensors("", "")), HasText("no JSON object"));
  CHECK_THAT(with_tensor(R"({"dtype":"F8","shape":[2],"data_offsets":[0,8]})", "12345678"),
             HasText("a dtype that we read"));
  CHECK_THAT(with_tensor(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})", "12345678"),
             HasText("tensor x: 8 bytes, but shape [3] of F32 has 12"));
  CHECK_THAT(
      with_tensor(R"({"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]})", "12345678"),
      HasText("too many"));
  CHECK_THAT(with_tensor(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})", "12345678"), HasText("/x/shape/0"));
  CHECK_THAT(with_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})", "12345678"),
             HasText("/x/data_offsets/1"));
  CHECK_THAT(with_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1})", "12345678"), HasText("more"));
  CHECK_THAT(with_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", "1234567"), HasText("truncated"));
  CHECK_THAT(with_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", "123456789"),
             HasText("bytes left over"));
  CHECK_THAT(with_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[4,12]})", "123456789012"),
             HasText("tensor x begins at 4 and 0 bytes are taken before it"));
  CHECK_THAT(
      message(safetensors(
          R"({"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
          "12345678")),
      HasText("tensor b begins at 4 and 6 bytes are taken before it"));
  CHECK_THAT(
      message(safetensors(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          "12")),
      HasText("a"));
  CHECK_THROWS_AS(SafetensorsFile(folder / "none"), InputError);
}

TEST_CASE("Mutated safetensors files are read or refused, never more") {
  const TemporaryFolder folder;
  const fs::path path = folder / "t.safetensors";
  const ModelSpec model = tiny_llama();
  export_initial<Bf16>(model, DType::bf16, DType::bf16, folder / "e");
  const std::string good = bytes_of_file(folder / "e" / "model.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, good.data(), 8);
  std::mt19937 random(2);
  int accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string bad = good.substr(0, 8 + length + 200);
    for (unsigned changes = 1 + random() % 4; changes > 0; --changes) {
      const std::size_t at = random() % (8 + length);
      switch (random() % 3) {
        case 0:
          bad[at] = static_cast<char>(random());
          break;
        case 1:
          bad.erase(at, 1 + random() % 8);
          break;
        default:
          bad.insert(at, 1, "0123456789[]{}\",:"[random() % 17]);
      }
    }
    bad += good.substr(8 + length + 200);
    write_bytes(path, bad);
    const std::string message = message_of([&] {
      const SafetensorsFile file(path);
      for (const SafetensorsEntry& entry : file.entries()) {
        std::vector<std::byte> bytes(static_cast<std::size_t>(entry.end - entry.begin));
        file.read(entry, 0, bytes);
      }
    });
    if (message == "accepted") {
      ++accepted;  // a letter of a name
    } else {
      CHECK_THAT(message, HasText("t.safetensors"));
    }
  }
  CHECK(accepted < 1500);
}

TEST_CASE("GPT-2 is exported in Hugging Face's names and orientation, without the tied head") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_gpt2();
  export_initial<Bf16>(model, DType::bf16, DType::bf16, folder / "e");
  const SafetensorsFile file(folder / "e" / "model.safetensors");
  CHECK(file.entries().size() == 2 + 2 * 12 + 2);
  CHECK(file.find("lm_head.weight") == nullptr);
  const SafetensorsEntry* const attention = file.find("transformer.h.1.attn.c_attn.weight");
  REQUIRE(attention != nullptr);
  CHECK(attention->shape == std::vector<std::int64_t>{32, 96});
  CHECK(file.find("transformer.h.0.mlp.c_fc.weight")->shape == std::vector<std::int64_t>{32, 128});
  CHECK(file.find("transformer.h.0.mlp.c_proj.weight")->shape == std::vector<std::int64_t>{128, 32});
  CHECK(file.find("transformer.wte.weight")->shape == std::vector<std::int64_t>{96, 32});
  CHECK(file.find("transformer.wpe.weight")->shape == std::vector<std::int64_t>{24, 32});

  // Row o, column i of our [out, in] is row i, column o there.
  const auto stored = values_of<std::uint16_t>(file, "transformer.h.1.attn.c_attn.weight");
  std::vector<float> ours(96 * 32);
  InitialWeights(model, 3).fill(2, 2, 0, 96 * 32, ours);
  for (std::size_t o = 0; o < 96; ++o) {
    for (std::size_t i = 0; i < 32; ++i) CHECK(stored[i * 96 + o] == narrow<Bf16>(ours[o * 32 + i]).bits);
  }
  const auto embedding = values_of<std::uint16_t>(file, "transformer.wte.weight");
  std::vector<float> table(96 * 32);
  InitialWeights(model, 3).fill(0, 0, 0, 96 * 32, table);
  for (std::size_t i = 0; i < table.size(); ++i) CHECK(embedding[i] == narrow<Bf16>(table[i]).bits);

  const auto config = nlohmann::json::parse(bytes_of_file(folder / "e" / "config.json"));
  CHECK(config.at("torch_dtype") == "bfloat16");
  CHECK(config.at("model_type") == "gpt2");
  CHECK(config.at("n_embd") == 32);
}

TEST_CASE("Large models are cut into files with an index, and everything comes back") {
  const TemporaryFolder folder;
  const ModelSpec model = GENERATE(0, 1) == 0 ? tiny_gpt2() : tiny_llama();
  const std::int64_t limit = GENERATE(as<std::int64_t>(), 1, 9000, 20000, 1 << 30);
  const DType stored = GENERATE(DType::bf16, DType::fp16, DType::fp32);
  export_initial<Bf16>(model, DType::bf16, stored, folder / "e", limit);
  std::int64_t bytes = 0;
  if (limit == 1 << 30) {
    CHECK_FALSE(fs::exists(folder / "e" / "model.safetensors.index.json"));
  } else {
    const auto index = nlohmann::json::parse(bytes_of_file(folder / "e" / "model.safetensors.index.json"));
    std::map<std::string, std::int64_t> in_file;
    for (const auto& [name, file] : index.at("weight_map").items()) {
      const SafetensorsFile read(folder / "e" / file.get<std::string>());
      const SafetensorsEntry* const entry = read.find(name);
      REQUIRE(entry != nullptr);
      bytes += entry->end - entry->begin;
      in_file[file.get<std::string>()] += entry->end - entry->begin;
      if (in_file[file.get<std::string>()] > limit) CHECK(read.entries().size() == 1);
    }
    CHECK(index.at("metadata").at("total_size") == bytes);
    CHECK(bytes == model.parameters() * size_of(stored));
    const std::string last = fmt::format("model-{0:05}-of-{0:05}.safetensors", in_file.size());
    CHECK(in_file.count(last) == 1);
  }
  // Back in another layout, in pieces, padding 0.
  const WeightImporter importer(model, folder / "e");
  std::mt19937 random(1);
  for (int block = 0; block < blocks_of(model); ++block) {
    const auto expected = flat_weights<Bf16>(model, block, DType::fp32);
    const auto size = std::ssize(expected);
    for (std::int64_t at = 0; at < size;) {
      const std::int64_t next = std::min<std::int64_t>(size, at + 1 + static_cast<std::int64_t>(random() % 3000));
      std::vector<float> found(static_cast<std::size_t>(next - at), 9.0f);
      importer.read({block, at, next}, DType::fp32, found);
      bool same = true;
      for (std::int64_t i = at; i < next; ++i) {
        const float right = widen(expected[static_cast<std::size_t>(i)]);
        const float rounded = stored == DType::fp16 ? widen(narrow<Fp16>(right)) : right;
        same = same && found[static_cast<std::size_t>(i - at)] == rounded;
      }
      CHECK(same);
      at = next;
    }
  }
}

TEST_CASE("Files of the bare GPT-2 are imported: names without prefix, masks, a copy of the tied head") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_gpt2();
  export_initial<Bf16>(model, DType::bf16, DType::fp32, folder / "e");
  const SafetensorsFile exported(folder / "e" / "model.safetensors");
  std::vector<SafetensorsEntry> entries = exported.entries();
  for (SafetensorsEntry& entry : entries) entry.name = entry.name.substr(std::string("transformer.").size());
  entries.push_back({"h.0.attn.bias", DType::u8, {1, 1, 4, 4}});
  entries.push_back({"lm_head.weight", DType::fp32, {96, 32}});
  const auto write = [&](const std::vector<SafetensorsEntry>& all) {
    SafetensorsWriter writer(folder / "bare.safetensors", all);
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::vector<std::byte> bytes(
          i + 2 < all.size()    ? static_cast<std::size_t>(exported.entries()[i].end - exported.entries()[i].begin)
          : i + 2 == all.size() ? 16u
                                : 96u * 32u * 4u);
      if (i + 2 < all.size()) exported.read(exported.entries()[i], 0, bytes);
      writer.add(bytes);
    }
    writer.finish();
  };
  write(entries);
  const WeightImporter bare(model, folder / "bare.safetensors");
  const WeightImporter full(model, folder / "e");
  for (int block = 0; block < blocks_of(model); ++block) {
    const std::int64_t size = flat_layout(kind_of(model, block), DType::bf16, 1).padded;
    std::vector<float> a(static_cast<std::size_t>(size)), b(a.size());
    bare.read({block, 0, size}, DType::bf16, a);
    full.read({block, 0, size}, DType::bf16, b);
    CHECK(a == b);
  }
  entries[entries.size() - 2].name = "h.0.attn.other";
  write(entries);
  CHECK_THAT(message_of([&] { WeightImporter(model, folder / "bare.safetensors"); }),
             HasText("tensor h.0.attn.other is none of model gpt2"));
}

TEST_CASE("Weights of a checkpoint are exported exactly as the run computes with them") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_llama();
  const bool split = GENERATE(false, true);
  Plan plan;
  plan.optimizer = plan.parameters = Placement::all(Tier::hbm, blocks_of(model));
  plan.precision.split_master = split;
  CheckpointMeta meta = checkpoint_meta(model, plan);
  meta.step = 1;
  CheckpointWriter writer(folder.path(), meta, model, 0);
  std::vector<std::vector<float>> masters;
  for (int block = 0; block < blocks_of(model); ++block) {
    std::vector<float> master(
        static_cast<std::size_t>(stored_elements(model, DType::bf16)[static_cast<std::size_t>(block)]));
    InitialWeights(model, 3).fill_flat(block, DType::bf16, 0, std::ssize(master), master);
    // Halfway between two bf16 values: the two roundings differ.
    for (std::size_t i = 0; i < master.size(); i += 3) {
      master[i] = std::bit_cast<float>((std::bit_cast<std::uint32_t>(master[i]) & 0xffff0000u) | 0x8000u);
    }
    const std::vector<std::byte> moments(master.size() * 4);
    writer.add({block, 0, std::ssize(master)}, master, moments, moments);
    masters.push_back(std::move(master));
  }
  const std::vector<std::string> files = {writer.finish()};
  commit_manifest(folder.path(), meta, model, files);
  const CheckpointReader checkpoint(folder.path(), model);
  export_checkpoint(checkpoint, model, DType::bf16, folder / "bf16");
  export_checkpoint(checkpoint, model, DType::fp32, folder / "fp32");
  const WeightImporter bf16(model, folder / "bf16");
  const WeightImporter fp32(model, folder / "fp32");
  for (int block = 0; block < blocks_of(model); ++block) {
    const std::vector<float>& master = masters[static_cast<std::size_t>(block)];
    std::vector<std::uint16_t> half_up(master.size());
    std::vector<std::int16_t> remainder(master.size());
    split_master(master, half_up, remainder);
    std::vector<float> weights(master.size()), full(master.size());
    bf16.read({block, 0, std::ssize(master)}, DType::bf16, weights);
    fp32.read({block, 0, std::ssize(master)}, DType::bf16, full);
    bool same = true;
    for (const TensorSpec& tensor : kind_of(model, block).tensors) same = same && !tensor.tied;
    CHECK(same);
    const auto offsets = tensor_offsets(kind_of(model, block), DType::bf16);
    for (std::size_t t = 0; t < offsets.size(); ++t) {
      for (std::int64_t e = 0; e < kind_of(model, block).tensors[t].elements(); ++e) {
        const auto i = static_cast<std::size_t>(offsets[t] + e);
        const float right = split ? widen(Bf16{half_up[i]}) : widen(narrow<Bf16>(master[i]));
        if (weights[i] != right || full[i] != master[i]) same = false;
      }
    }
    CHECK(same);
  }
}

TEST_CASE("Exports and imports that cannot be right are refused") {
  const TemporaryFolder folder;
  const ModelSpec model = tiny_llama();
  export_initial<float>(model, DType::fp32, DType::fp32, folder / "e");
  CHECK_THAT(message_of([&] { WeightExporter(model, DType::bf16, folder / "e"); }), HasText("already"));
  fs::remove(folder / "e" / "config.json");
  CHECK_THAT(message_of([&] { WeightExporter(model, DType::bf16, folder / "e"); }),
             HasText("holds model.safetensors already"));
  CHECK_THAT(message_of([&] { WeightExporter(find_model("bloom-560m"), DType::bf16, folder / "b"); }),
             HasText("weights of family bloom are neither exported nor imported, expected one of gpt2, llama"));
  CHECK_FALSE(fs::exists(folder / "b"));
  {
    WeightExporter unfinished(model, DType::bf16, folder / "u");
    CHECK_THROWS_AS(unfinished.finish(), std::logic_error);
    CHECK_THROWS_AS(unfinished.add_block(DType::bf16, {}), std::logic_error);
  }
  CHECK(fs::is_empty(folder / "u"));

  const ModelSpec wider = read_model(
      R"({"model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
          "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 80})",
      "wider.json");
  CHECK_THAT(
      message_of([&] { WeightImporter(wider, folder / "e"); }),
      HasText("tensor model.layers.0.mlp.gate_proj.weight: expected [80, 48] of BF16, F16 or F32, found [72, 48]"));
  const ModelSpec deeper = read_model(
      R"({"model_type": "llama", "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
          "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 80})",
      "deeper.json");
  CHECK_THAT(message_of([&] { WeightImporter(deeper, folder / "e"); }),
             HasText("tensor model.layers.2.input_layernorm.weight is missing"));
  const ModelSpec shallower = read_model(
      R"({"model_type": "llama", "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 1,
          "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 80})",
      "shallower.json");
  CHECK_THAT(message_of([&] { WeightImporter(shallower, folder / "e"); }), HasText("is none of model"));
  CHECK_THAT(message_of([&] { WeightImporter(model, folder / "u"); }), HasText("holds neither"));
  // One file is enough.
  CHECK(message_of([&] { WeightImporter(model, folder / "e" / "model.safetensors"); }) == "accepted");
}
