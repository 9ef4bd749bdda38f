#include "runtime/model_constants.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "models/error.h"

namespace zeroplan {
namespace {

using Json = nlohmann::json;

constexpr std::array<std::string_view, 3> kFamilies = {"gpt2", "llama", "mistral"};

[[noreturn]] void refuse(const ModelSpec& model, std::string_view key, const std::string& why) {
  throw InputError(fmt::format("{}: {}: {}", model.source, key, why));
}

/// `otherwise` where the key is missing or null.
double number(const ModelSpec& model, const Json& config, const char* key, double otherwise) {
  const auto it = config.find(key);
  if (it == config.end() || it->is_null()) return otherwise;
  if (!it->is_number()) refuse(model, key, fmt::format("expected a number, got {}", it->dump()));
  return it->get<double>();
}

double positive(const ModelSpec& model, const Json& config, const char* key, double otherwise) {
  const double value = number(model, config, key, otherwise);
  if (!(value > 0)) refuse(model, key, fmt::format("expected a positive number, got {}", value));
  return value;
}

bool flag(const Json& config, const char* key, bool otherwise) {
  const auto it = config.find(key);
  return it != config.end() && it->is_boolean() ? it->get<bool>() : otherwise;
}

// transformers 5 writes rope_parameters; before it was rope_theta beside rope_scaling.
void read_rope(const ModelSpec& model, const Json& config, ModelConstants& c) {
  c.rope_theta = positive(model, config, "rope_theta", 10000.0);
  if (number(model, config, "partial_rotary_factor", 1.0) != 1.0) {
    refuse(model, "partial_rotary_factor", "the runtime turns whole heads: expected 1");
  }
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const auto it = config.find(key);
    if (it == config.end() || !it->is_object()) continue;
    c.rope_theta = positive(model, *it, "rope_theta", c.rope_theta);
    std::string type = "default";
    for (const char* name : {"type", "rope_type"}) {
      if (it->contains(name) && it->at(name).is_string()) type = it->at(name).get<std::string>();
    }
    if (type == "default") continue;
    if (type != "llama3") {
      refuse(model, key,
             fmt::format("the runtime has rotary positions of type default and llama3, found \"{}\"", type));
    }
    Llama3Scaling s;
    s.factor = positive(model, *it, "factor", s.factor);
    s.low_freq_factor = positive(model, *it, "low_freq_factor", s.low_freq_factor);
    s.high_freq_factor = positive(model, *it, "high_freq_factor", s.high_freq_factor);
    s.original_positions = static_cast<std::int64_t>(
        positive(model, *it, "original_max_position_embeddings", static_cast<double>(s.original_positions)));
    c.rope_scaling = s;
  }
}

void check_gpt2(const ModelSpec& model, const Json& config) {
  if (!flag(config, "scale_attn_weights", true)) {
    refuse(model, "scale_attn_weights", "the runtime's attention scales by 1 / sqrt(head_dim), found false");
  }
  if (flag(config, "scale_attn_by_inverse_layer_idx", false)) {
    refuse(model, "scale_attn_by_inverse_layer_idx", "the runtime has no attention scaled by layer, found true");
  }
}

void note_dropout(const ModelSpec& model, const Json& config, ModelConstants& c) {
  for (const char* key : {"resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"}) {
    if (number(model, config, key, 0) > 0) {
      c.assumptions.push_back({"dropout", "none", fmt::format("the runtime has no dropout; {} is not applied", key)});
      return;
    }
  }
}

void check_heads(const ModelSpec& model, const BlockKind& kind) {
  const bool turned = std::ranges::find(kind.ops, Kernel::rotary, &GraphOp::kernel) != kind.ops.end();
  for (const GraphOp& op : kind.ops) {
    if (op.kernel == Kernel::attention && turned && op.attention.qk_dim % 2 != 0) {
      refuse(model, "head_dim",
             fmt::format("rotary positions turn pairs: expected an even number, got {}", op.attention.qk_dim));
    }
  }
}

// Every op has a kernel; names of activation functions are looked up now and not in the middle of a step.
void check_ops(const ModelSpec& model) {
  for (const BlockKind& kind : model.kinds) {
    check_heads(model, kind);
    for (const GraphOp& op : kind.ops) {
      switch (op.kernel) {
        case Kernel::activation:
          activation_shape(op);
          break;
        case Kernel::embedding:
        case Kernel::norm:
        case Kernel::linear:
        case Kernel::rotary:
        case Kernel::attention:
        case Kernel::add:
          break;
        case Kernel::router:
        case Kernel::permute:
        case Kernel::grouped_linear:
        case Kernel::combine:
          refuse(model, "model_type", "the runtime has no kernel for '" + op.name + "'");
      }
    }
    for (const TensorSpec& tensor : kind.tensors) {
      if (!tensor.trainable) refuse(model, tensor.name, "the runtime trains every tensor, found a frozen one");
    }
    if (kind.role == BlockRole::head && kind.head_tensor < 0) {
      refuse(model, "model_type", "the runtime needs a model with an output matrix over a vocabulary");
    }
    if (kind.head_bias >= 0) refuse(model, "model_type", "the runtime has no bias on the output matrix");
  }
}

}  // namespace

ModelConstants model_constants(const ModelSpec& model) {
  if (std::ranges::find(kFamilies, model.family) == kFamilies.end()) {
    refuse(model, "model_type",
           fmt::format("expected a model the runtime can execute (gpt2, llama, mistral), found \"{}\"", model.family));
  }
  const Json config = Json::parse(model.config);
  ModelConstants c;
  const bool gpt2 = model.family == "gpt2";
  // Defaults of the Hugging Face configuration classes.
  c.norm_epsilon =
      gpt2 ? positive(model, config, "layer_norm_epsilon", 1e-5) : positive(model, config, "rms_norm_eps", 1e-6);
  if (gpt2) {
    check_gpt2(model, config);
  } else {
    read_rope(model, config, c);
  }
  note_dropout(model, config, c);
  check_ops(model);
  return c;
}

void check_positions(const ModelSpec& model, std::int64_t seq_len) {
  for (const BlockKind& kind : model.kinds) {
    for (const TensorSpec& tensor : kind.tensors) {
      if (tensor.kind != TensorKind::position || tensor.shape[0] >= seq_len) continue;
      throw InputError(fmt::format("plan: seq_len: expected at most {}, the positions of {} in {}, found {}",
                                   tensor.shape[0], tensor.name, model.source, seq_len));
    }
  }
}

RotaryTable rotary_table(const ModelSpec& model, const ModelConstants& constants, std::int64_t seq_len) {
  for (const BlockKind& kind : model.kinds) {
    const auto rotary = std::ranges::find(kind.ops, Kernel::rotary, &GraphOp::kernel);
    const auto attention = std::ranges::find(kind.ops, Kernel::attention, &GraphOp::kernel);
    if (rotary == kind.ops.end() || attention == kind.ops.end()) continue;
    const std::int64_t head_dim = attention->attention.qk_dim;
    return constants.rope_scaling ? make_rotary_table(seq_len, head_dim, constants.rope_theta, *constants.rope_scaling)
                                  : make_rotary_table(seq_len, head_dim, constants.rope_theta);
  }
  return {};
}

}  // namespace zeroplan
