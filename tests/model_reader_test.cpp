// Reading configurations: defaults, refusals that point, names, random damage.

#include <filesystem>
#include <fstream>
#include <random>

#include <nlohmann/json.hpp>

#include "models/error.h"
#include "models/families.h"
#include "tests/catch.h"
#include "tests/model_test_support.h"
#include "tests/temporary_folder.h"

using namespace zeroplan;
using zeroplan::tests::HasText;
using Json = nlohmann::ordered_json;

namespace {

std::string config_of(const char* model) { return find_model(model).config; }

/// The catalog's configuration with `patch` applied (a null value removes the key).
std::string patched(const char* model, const char* patch) {
  Json config = Json::parse(config_of(model));
  config.merge_patch(Json::parse(patch));
  return config.dump(2);
}

std::string refusal(const std::string& text) {
  try {
    read_model(text, "dir/config.json");
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

struct BadConfig {
  const char* model;
  const char* patch;
  const char* says;
};

// clang-format off
const BadConfig kBad[] = {
    {"llama-2-7b", R"({"hidden_size": -4096})", "/hidden_size"},
    {"llama-2-7b", R"({"hidden_size": 0})", "/hidden_size"},
    {"llama-2-7b", R"({"hidden_size": 1000001})", "/hidden_size"},
    {"llama-2-7b", R"({"hidden_size": "4096"})", "/hidden_size"},
    {"llama-2-7b", R"({"hidden_size": 4096.5})", "/hidden_size"},
    {"llama-2-7b", R"({"hidden_size": 1e300})", "/hidden_size"},
    {"llama-2-7b", R"({"hidden_size": [4096]})", "/hidden_size"},
    {"llama-2-7b", R"({"hidden_size": true})", "/hidden_size"},
    {"llama-2-7b", R"({"hidden_size": null})", "hidden_size"},
    {"llama-2-7b", R"({"hidden_size": 4097})", "num_attention_heads"},
    {"llama-2-7b", R"({"num_hidden_layers": null})", "num_hidden_layers"},
    {"llama-2-7b", R"({"num_hidden_layers": 0})", "/num_hidden_layers"},
    {"llama-2-7b", R"({"num_hidden_layers": 10001})", "/num_hidden_layers"},
    {"llama-2-7b", R"({"num_attention_heads": null})", "num_attention_heads"},
    {"llama-2-7b", R"({"num_attention_heads": 31})", "num_attention_heads"},
    {"llama-2-7b", R"({"num_key_value_heads": 5})", "num_key_value_heads"},
    {"llama-2-7b", R"({"num_key_value_heads": 0})", "/num_key_value_heads"},
    {"llama-2-7b", R"({"num_key_value_heads": 64})", "num_key_value_heads"},
    {"llama-2-7b", R"({"intermediate_size": null})", "intermediate_size"},
    {"llama-2-7b", R"({"intermediate_size": -1})", "/intermediate_size"},
    {"llama-2-7b", R"({"vocab_size": 0})", "/vocab_size"},
    {"llama-2-7b", R"({"vocab_size": 100000001})", "/vocab_size"},
    {"llama-2-7b", R"({"max_position_embeddings": -1})", "/max_position_embeddings"},
    {"llama-2-7b", R"({"hidden_act": "sliu"})", "did you mean silu"},
    {"llama-2-7b", R"({"hidden_act": 3})", "/hidden_act"},
    {"llama-2-7b", R"({"tie_word_embeddings": "no"})", "/tie_word_embeddings"},
    {"llama-2-7b", R"({"attention_bias": 1})", "/attention_bias"},
    {"llama-2-7b", R"({"model_type": "lama"})", "llama"},
    {"llama-2-7b", R"({"model_type": null})", "model_type"},
    {"llama-2-7b", R"({"model_type": 7})", "/model_type"},
    {"llama-2-7b", R"({"hidden_size": 1000000, "num_attention_heads": 1, "num_key_value_heads": 1,
                       "intermediate_size": 100000000, "num_hidden_layers": 10000})", "2^53"},
    {"gpt2", R"({"n_embd": 1e9})", "/n_embd"},
    {"gpt2", R"({"n_positions": null})", "n_positions"},
    {"gpt2", R"({"hidden_size": 1024})", "/hidden_size"},
    {"gpt2", R"({"n_head": 7})", "n_head"},
    {"mixtral-8x7b", R"({"num_experts_per_tok": 9})", "num_local_experts"},
    {"mixtral-8x7b", R"({"num_local_experts": 0})", "/num_local_experts"},
    {"mixtral-8x7b", R"({"num_local_experts": null})", "num_local_experts"},
    {"qwen3-30b-a3b", R"({"mlp_only_layers": [48]})", "/mlp_only_layers/0"},
    {"qwen3-30b-a3b", R"({"mlp_only_layers": 3})", "/mlp_only_layers"},
    {"qwen3-30b-a3b", R"({"decoder_sparse_step": 0})", "/decoder_sparse_step"},
    {"deepseek-v3", R"({"kv_lora_rank": null})", "kv_lora_rank"},
    {"deepseek-v3", R"({"q_lora_rank": -1})", "/q_lora_rank"},
    {"gpt-oss-20b", R"({"layer_types": ["full_attention"]})", "24 entries"},
    {"gpt-oss-20b", R"({"sliding_window": 0})", "/sliding_window"},
    {"dbrx", R"({"ffn_config": 4})", "/ffn_config"},
    {"dbrx", R"({"attn_config": {"kv_n_heads": 7}})", "/attn_config/kv_n_heads"},
    {"opt-125m", R"({"word_embed_proj_dim": 512})", "/word_embed_proj_dim"},
    {"bert-base-uncased", R"({"position_embedding_type": "relative_key"})", "/position_embedding_type"},
    {"vit-base-patch16-224", R"({"patch_size": 15})", "/patch_size"},
    {"t5-small", R"({"d_kv": null})", "d_kv"},
    {"t5-small", R"({"feed_forward_proj": "gated-unknown"})", "/feed_forward_proj"},
    {"mpt-7b", R"({"norm_type": "rmsnorm"})", "/norm_type"},
    {"glm-4-9b", R"({"multi_query_group_num": 64})", "/multi_query_group_num"},
    {"llama-4-scout-17b-16e", R"({"text_config": {"hidden_size": -5}})", "/text_config/hidden_size"},
};
// clang-format on

}  // namespace

TEST_CASE("Wrong configurations are refused at the line and key") {
  for (const BadConfig& bad : kBad) {
    CAPTURE(bad.model, bad.patch);
    const std::string message = refusal(patched(bad.model, bad.patch));
    CHECK_THAT(message, HasText("config.json:"));
    CHECK_THAT(message, HasText(bad.says));
    CHECK_THAT(message, HasText("expected"));
    CHECK(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("Texts that are no configuration are refused") {
  for (const char* text : {"", " ", "[]", "3", "null", "{", "{}", "{\"model_type\": \"llama\"", "{\"model_type\": NaN}",
                           "{\"model_type\": \"llama\"} x", "{\"model_type\": \"llama\", \"model_type\": \"llama\"}"}) {
    CAPTURE(text);
    CHECK_THAT(refusal(text), HasText("config.json:1"));
  }
}

TEST_CASE("A missing optional key takes the family's default and is reported") {
  const ModelSpec model = read_model(patched("llama-3-8b", R"({"num_key_value_heads": null,
      "tie_word_embeddings": null})"),
                                     "m/config.json");
  CHECK(model.name == "m");
  const auto reported = [&](const char* what) {
    for (const Assumption& a : model.assumptions) {
      if (a.what == what) return a.value;
    }
    return std::string("not reported");
  };
  CHECK(reported("num_key_value_heads") == "32");
  CHECK(reported("tie_word_embeddings") == "false");
}

TEST_CASE("Comments are allowed, dropout is reported, suspicious keys are warned of and harmless ones are not") {
  std::string text = patched("gpt2", R"({"num_experts": 8, "summary_first_dropout": 0.5, "rope_scaling": 1,
      "bos_token_id": 5, "use_cache": true, "torch_dtype": "bfloat16"})");
  text.insert(1, "// a comment\n/* another */");
  const ModelSpec model = read_model(text, "gpt2.json");
  REQUIRE(model.warnings.size() == 1);
  CHECK_THAT(model.warnings[0], HasText("/num_experts"));
  bool dropout = false;
  for (const Assumption& a : model.assumptions) dropout = dropout || a.what == "dropout";
  CHECK(dropout);
}

TEST_CASE("Layouts outside the catalog are read too") {
  // Falcon-rw: plain GPT with ALiBi, biases and two norms in sequence.
  const ModelSpec rw = read_model(patched("falcon-7b", R"({"hidden_size": 2048, "num_attention_heads": 32,
      "num_hidden_layers": 24, "vocab_size": 50304, "multi_query": false, "parallel_attn": false, "bias": true,
      "alibi": true})"),
                                  "falcon-rw-1b.json");
  CHECK(rw.parameters() == 1311625216);  // Vh + 24 (12 h^2 + 13 h) + 2 h
  // T5 v1.1 small: gated, untied head.
  const ModelSpec t5 = read_model(patched("t5-small", R"({"d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8,
      "num_heads": 6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": false})"),
                                  "t5.json");
  CHECK(t5.parameters() == 76961152);  // the published size of google/t5-v1_1-small
  // A gated dense layer inside a Qwen3 MoE.
  const ModelSpec mixed = read_model(patched("qwen3-30b-a3b", R"({"mlp_only_layers": [0, 5]})"), "mixed.json");
  CHECK(mixed.kinds[static_cast<std::size_t>(mixed.sequence[6])].name == "dense layer");
  CHECK(mixed.kinds[static_cast<std::size_t>(mixed.sequence[5])].name == "MoE layer");
  // GPT-NeoX without the parallel residual has the same parameters.
  CHECK(read_model(patched("pythia-160m", R"({"use_parallel_residual": false})"), "p.json").parameters() ==
        find_model("pythia-160m").parameters());
}

TEST_CASE("A multimodal file is read by its text_config, and its flags hold where that has none") {
  const char* text = R"({"model_type": "gemma3", "tie_word_embeddings": false, "vision_config": {"hidden_size": 9},
      "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
      "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
      "vocab_size": 262208}})";
  const ModelSpec model = read_model(text, "gemma.json");
  CHECK(model.family == "gemma3_text");
  CHECK_FALSE(model.tied_embeddings);
  CHECK(model.parameters() == find_model("gemma-3-4b-text").parameters() + 262208 * std::int64_t{2560});
  CHECK(model.warnings.empty());
}

TEST_CASE("T5 runs an encoder, then a decoder that reads its output") {
  const ModelSpec model = find_model("t5-small");
  REQUIRE(model.sequence.size() == 1 + 6 + 1 + 6 + 1);
  const auto kind = [&](std::size_t i) -> const BlockKind& {
    return model.kinds[static_cast<std::size_t>(model.sequence[i])];
  };
  CHECK(kind(0).role == BlockRole::embedding);
  CHECK(kind(6).ends_encoder);
  CHECK(kind(7).role == BlockRole::embedding);
  CHECK(kind(7).parameters() == 0);
  for (std::size_t i = 8; i < 14; ++i) CHECK(kind(i).memory >= 0);
  CHECK(kind(14).vocab == 32128);
}

TEST_CASE("Windows follow each family's pattern") {
  const auto windows = [](const char* name) {
    const ModelSpec model = find_model(name);
    std::string pattern;
    for (const int index : model.sequence) {
      for (const GraphOp& op : model.kinds[static_cast<std::size_t>(index)].ops) {
        if (op.kernel == Kernel::attention) pattern += op.attention.window > 0 ? 'w' : 'f';
      }
    }
    return pattern.substr(0, 8);
  };
  CHECK(windows("mistral-7b-v0.1") == "wwwwwwww");
  CHECK(windows("mistral-7b-v0.3") == "ffffffff");
  CHECK(windows("gemma-2-2b") == "wfwfwfwf");
  CHECK(windows("gemma-3-1b") == "wwwwwfww");
  CHECK(windows("gpt-oss-20b") == "wfwfwfwf");
  CHECK(windows("llama-4-scout-17b-16e") == "wwwfwwwf");
  CHECK(windows("qwen2-7b") == "ffffffff");
}

TEST_CASE("Sizes and hub names find the catalog's models") {
  const std::pair<const char*, const char*> cases[] = {
      {"70B", "llama-2-70b"},
      {"7b", "llama-2-7b"},
      {"13B", "llama-2-13b"},
      {"8B", "llama-3.1-8b"},
      {"405B", "llama-3.1-405b"},
      {"llama-3-8b", "llama-3-8b"},
      {"LLAMA_3_8B", "llama-3-8b"},
      {"Llama-2-70b-hf", "llama-2-70b"},
      {"meta-llama/Llama-2-70b-hf", "llama-2-70b"},
      {"meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"},
      {"Qwen/Qwen2.5-7B", "qwen2.5-7b"},
      {"mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"},
      {"mistralai/Mixtral-8x22B-Instruct", "mixtral-8x22b-instruct"},
      {"google/gemma-2-9b-it", "gemma-2-9b"},
  };
  for (const auto& [text, name] : cases) {
    CAPTURE(text);
    const ModelSpec model = find_model(text);
    CHECK(model.name == name);
    CHECK((text == model.name || (!model.assumptions.empty() && model.assumptions[0].what == "model")));
  }
  CHECK(find_model("70B").parameters() == 68976648192);
}

TEST_CASE("Unknown and ambiguous models name candidates") {
  CHECK_THROWS_WITH(find_model("32B"), HasText("qwen2.5-32b") && HasText("qwen3-32b") && HasText("olmo-2-32b"));
  CHECK_THROWS_WITH(find_model("71B"), HasText("70b"));
  CHECK_THROWS_WITH(find_model("llama-2-7q"), HasText("llama-2-7b"));
  CHECK_THROWS_AS(find_model(""), InputError);
  CHECK_THROWS_AS(find_model("/dev/null"), InputError);
  CHECK_THROWS_AS(find_model("/nonexistent/config.json"), InputError);
  CHECK_THROWS_AS(find_model(std::string(5000, 'a')), InputError);
  CHECK_THROWS_AS(find_model(std::string("a\0b", 3)), InputError);
}

TEST_CASE("A config.json and the directory that holds it are the same model") {
  namespace fs = std::filesystem;
  const tests::TemporaryFolder folder;
  const fs::path root = folder.path();
  fs::create_directories(root / "my-model");
  fs::create_directories(root / "empty");
  {
    std::ofstream(root / "my-model" / "config.json") << config_of("qwen2-0.5b");
    std::ofstream(root / "other.json") << config_of("qwen2-0.5b");
  }
  const ModelSpec from_folder = find_model((root / "my-model").string());
  CHECK(from_folder.name == "my-model");
  CHECK(find_model((root / "my-model" / "config.json").string()).name == "my-model");
  CHECK(find_model((root / "other.json").string()).name == "other");
  CHECK(from_folder.parameters() == find_model("qwen2-0.5b").parameters());
  CHECK_THROWS_WITH(find_model((root / "empty").string()), HasText("config.json"));
}

TEST_CASE("LoRA freezes the model and adds r (in + out) for each linear of the layers") {
  ModelSpec model = find_model("llama-2-7b");
  const std::int64_t before = model.parameters();
  const std::int64_t kept = test::kept_bytes(test::first_layer(model));
  constexpr std::int64_t kRank = 16;
  apply_lora(model, kRank);
  const std::int64_t h = 4096, f = 11008;
  CHECK(model.trainable_parameters() == 32 * kRank * (4 * (h + h) + 3 * (h + f)));
  CHECK(model.parameters() == before + model.trainable_parameters());
  // Each of the seven adapters keeps its inner result (2r); inputs are kept as before, by the adapters.
  CHECK(test::kept_bytes(test::first_layer(model)) == kept + 7 * 2 * kRank);
  const double tokens = 4096;
  // 4 N_mm + 6 N_lora + 3 F_attn a token, less the gradients into the embedding's output, which is frozen: the first
  // layer's q, k and v and their A.
  const double expected = 4.0 * 6607077376 + 6.0 * static_cast<double>(model.trainable_parameters()) +
                          12.0 * 4096 * 4096 * 32 - 2.0 * 3 * (4096 * 4096 + 4096 * kRank);
  CHECK(model_flops(model, {1, 4096}, AttentionCount::full).base() / tokens == Approx(expected).epsilon(1e-9));
  bool found = false;
  for (const ListedTensor& t : list_tensors(model)) {
    if (t.name != "model.layers.31.mlp.down_proj.lora_A.weight") continue;
    found = true;
    CHECK(t.shape == std::vector<std::int64_t>{kRank, f});
    CHECK(t.layer == 31);
  }
  CHECK(found);
}

TEST_CASE("LoRA adapts the experts of every layout and refuses silly ranks") {
  for (const char* name : {"mixtral-8x7b", "gpt-oss-20b", "dbrx", "deepseek-v2-lite", "t5-small", "gpt2", "glm-4-9b"}) {
    ModelSpec model = find_model(name);
    CAPTURE(name);
    apply_lora(model, 8);
    CHECK(model.trainable_parameters() > 0);
    CHECK(model.trainable_parameters() < model.parameters() / 20);
  }
  ModelSpec model = find_model("gpt2");
  CHECK_THROWS_AS(apply_lora(model, 0), InputError);
  CHECK_THROWS_AS(apply_lora(model, -1), InputError);
  CHECK_THROWS_AS(apply_lora(model, 769), InputError);
}

TEST_CASE("Families are sorted and found by name") {
  CHECK(families().size() == 30);
  CHECK(std::is_sorted(families().begin(), families().end(),
                       [](const Family& a, const Family& b) { return a.model_type < b.model_type; }));
  for (const Family& family : families()) CHECK(find_family(family.model_type) == &family);
  CHECK(find_family("llam") == nullptr);
}

namespace {

Json random_value(std::mt19937_64& random) {
  switch (random() % 14) {
    case 0:
      return nullptr;
    case 1:
      return 0;
    case 2:
      return -1;
    case 3:
      return 1;
    case 4:
      return std::int64_t{1} << (random() % 63);
    case 5:
      return -(std::int64_t{1} << (random() % 63));
    case 6:
      return 1e300;
    case 7:
      return 0.5;
    case 8:
      return "";
    case 9:
      return "gelu";
    case 10:
      return true;
    case 11:
      return Json::array({1, "x"});
    case 12:
      return Json::object({{"a", 1}});
    default:
      return static_cast<std::int64_t>(random() % 200);
  }
}

/// Changes a few values or keys of `config`, or bytes of its text.
std::string damaged(Json config, std::mt19937_64& random) {
  Json* target = &config;
  if (config.contains("text_config")) target = &config["text_config"];
  const auto changes = 1 + random() % 3;
  for (std::uint64_t i = 0; i < changes; ++i) {
    auto at = target->begin();
    std::advance(at, static_cast<std::ptrdiff_t>(random() % target->size()));
    if (random() % 5 == 0) {
      target->erase(at.key());
      if (target->empty()) break;
    } else {
      at.value() = random_value(random);
    }
  }
  std::string text = config.dump();
  if (random() % 4 == 0) text[random() % text.size()] = static_cast<char>(random() % 256);
  if (random() % 16 == 0) text.resize(random() % text.size());
  return text;
}

}  // namespace

TEST_CASE("Random damage is read or refused, and nothing else") {
  std::mt19937_64 random(20261130);
  std::vector<Json> configs;
  for (const std::string& name : model_names()) configs.push_back(Json::parse(find_model(name).config));
  int accepted = 0;
  constexpr int kRounds = 5000;
  for (int i = 0; i < kRounds; ++i) {
    const std::string text = damaged(configs[random() % configs.size()], random);
    try {
      const ModelSpec model = read_model(text, "fuzz.json");
      ++accepted;
      if (model.parameters() <= 0 || model.parameters() >= (std::int64_t{1} << 53)) FAIL(text);
      if (read_model(model.config, "fuzz.json").parameters() != model.parameters()) FAIL(text);
    } catch (const InputError&) {
    } catch (const std::exception& error) {
      FAIL(error.what() << ": " << text);
    }
  }
  CHECK(accepted > kRounds / 20);
  CHECK(accepted < kRounds);
}
