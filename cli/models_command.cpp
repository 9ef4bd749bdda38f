#include "cli/models_command.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <nlohmann/json.hpp>

#include "models/block_program.h"
#include "models/state_regimes.h"
#include "models/units.h"

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

/// Sequence length that FLOPs a token are stated for (spec section 3, Defaults).
std::int64_t shown_seq_len(const ModelSpec& model) {
  constexpr std::int64_t kDefault = 4096;
  return model.max_positions > 0 ? std::min(kDefault, model.max_positions) : kDefault;
}

double flops_per_token(const ModelSpec& model, AttentionCount count) {
  const TokenShape shape{1, shown_seq_len(model)};
  return model_flops(model, shape, count).base() / static_cast<double>(shape.tokens());
}

/// Bytes a token that stay between forward and backward in 16-bit training.
std::int64_t saved_bytes(const BlockKind& kind, Recompute mode) {
  const BlockProgram program = build_program(kind, mode);
  double bytes = 0;
  for (const int slot : program.saved) {
    const int index = program.slots[static_cast<std::size_t>(slot)].value;
    const Value& value = kind.values[static_cast<std::size_t>(index)];
    DType type = DType::bf16;
    if (value.type == ValueType::fp32) type = DType::fp32;
    if (value.type == ValueType::byte) type = DType::u8;
    bytes += bytes_of(value.per_token, type).base();
  }
  return static_cast<std::int64_t>(bytes);
}

std::string shape_text(const std::vector<std::int64_t>& shape) { return fmt::format("{}", fmt::join(shape, " x ")); }

/// The first attention of the model: every layer has the same heads.
const AttentionShape* attention_of(const ModelSpec& model) {
  for (const BlockKind& kind : model.kinds) {
    for (const GraphOp& op : kind.ops) {
      if (op.kernel == Kernel::attention) return &op.attention;
    }
  }
  return nullptr;
}

std::int64_t heads_of(const ModelSpec& model) {
  const AttentionShape* attention = attention_of(model);
  return attention != nullptr ? attention->heads : 0;
}

std::vector<std::int64_t> times_used(const ModelSpec& model) {
  std::vector<std::int64_t> times(model.kinds.size(), 0);
  for (const int index : model.sequence) ++times[static_cast<std::size_t>(index)];
  return times;
}

/// Catalog files say in "_source" where their keys were read.
std::string facts_source(const ModelSpec& model) {
  const Json config = Json::parse(model.config);
  const auto source = config.find("_source");
  return source != config.end() && source->is_string() ? source->get<std::string>() : std::string();
}

// --- text -------------------------------------------------------------------------------------------

struct TensorGroup {
  const TensorSpec* tensor = nullptr;
  std::int64_t count = 0;
};

/// Tensors of equal name over all kinds, in the order of their first use.
std::vector<TensorGroup> group_tensors(const ModelSpec& model) {
  const auto times = times_used(model);
  std::vector<TensorGroup> groups;
  std::map<std::pair<std::string_view, std::vector<std::int64_t>>, std::size_t> index;
  for (std::size_t k = 0; k < model.kinds.size(); ++k) {
    for (const TensorSpec& tensor : model.kinds[k].tensors) {
      const auto [at, is_new] = index.emplace(std::pair(std::string_view(tensor.name), tensor.shape), groups.size());
      if (is_new) groups.push_back({&tensor, 0});
      groups[at->second].count += times[k] * tensor.copies;
    }
  }
  return groups;
}

std::string mark(const TensorSpec& tensor) {
  if (tensor.tied) return "  tied to the input embedding";
  return tensor.trainable ? "" : "  frozen";
}

void print_tensors(const ModelSpec& model, std::ostream& out) {
  const auto groups = group_tensors(model);
  std::size_t name_width = 0;
  std::size_t shape_width = 0;
  for (const TensorGroup& group : groups) {
    name_width = std::max(name_width, group.tensor->name.size());
    shape_width = std::max(shape_width, shape_text(group.tensor->shape).size());
  }
  fmt::print(out, "\n{:<{}}  {:>{}}  {:>7}  {:>20}\n", "tensor", name_width, "shape", shape_width, "count",
             "parameters");
  for (const auto& [tensor, count] : groups) {
    const std::int64_t all = tensor->tied ? 0 : tensor->elements() / tensor->copies * count;
    fmt::print(out, "{:<{}}  {:>{}}  {:>7}  {:>20}{}\n", tensor->name, name_width, shape_text(tensor->shape),
               shape_width, count, format_count(all), mark(*tensor));
  }
}

void print_sizes(const ModelSpec& model, std::ostream& out) {
  fmt::print(out, "parameters         {}\n", format_count(model.parameters()));
  if (model.active_parameters() != model.parameters()) {
    fmt::print(out, "active parameters  {} a token\n", format_count(model.active_parameters()));
  }
  if (model.trainable_parameters() != model.parameters()) {
    fmt::print(out, "trainable          {}\n", format_count(model.trainable_parameters()));
  }
  fmt::print(out, "layers             {}, hidden {}", model.num_layers, model.hidden);
  if (const AttentionShape* attention = attention_of(model)) {
    fmt::print(out, ", {} heads ({} for keys and values) of {}", attention->heads, attention->kv_heads,
               attention->qk_dim);
  }
  fmt::print(out, "\n");
  if (model.vocab > 0) {
    fmt::print(out, "vocabulary         {}, {}\n", model.vocab,
               model.tied_embeddings ? "output matrix tied to the embedding" : "output matrix of its own");
  }
  if (model.max_positions > 0) fmt::print(out, "maximum sequence   {}\n", model.max_positions);
}

void print_work(const ModelSpec& model, std::ostream& out) {
  constexpr double kGiga = 1e9;
  fmt::print(
      out,
      "training FLOPs     {:.2f} GFLOP a token at sequence {} (attention counted causally; {:.2f} counted in full)\n",
      flops_per_token(model, AttentionCount::causal) / kGiga, shown_seq_len(model),
      flops_per_token(model, AttentionCount::full) / kGiga);
  fmt::print(out, "\nkept for backward, bytes a token in 16-bit training (recompute none / selective / full)\n");
  const auto times = times_used(model);
  for (std::size_t k = 0; k < model.kinds.size(); ++k) {
    const BlockKind& kind = model.kinds[k];
    if (kind.role != BlockRole::layer) continue;
    fmt::print(out, "  {} x {}: {} / {} / {}\n", times[k], kind.name, format_count(saved_bytes(kind, Recompute::none)),
               format_count(saved_bytes(kind, Recompute::selective)), format_count(saved_bytes(kind, Recompute::full)));
  }
}

/// Guides that quote one number each mean one of these.
void print_states(const ModelSpec& model, std::ostream& out) {
  fmt::print(out, "\nweights, gradients and optimizer states in training, all GPUs together (activations on top)\n");
  for (const StateRegime& regime : state_regimes()) {
    fmt::print(out, "  {:>2.0f} bytes a parameter  {:>9.1f} GB  {}: {}\n", regime.bytes,
               state_bytes(model, regime).base() / 1e9, regime.what, regime.seen_in);
  }
}

void print_notes(const ModelSpec& model, std::ostream& out) {
  if (const std::string source = facts_source(model); !source.empty()) fmt::print(out, "\nfacts from: {}\n", source);
  if (!model.assumptions.empty()) fmt::print(out, "\nassumptions\n");
  for (const Assumption& a : model.assumptions) fmt::print(out, "  {}: {} ({})\n", a.what, a.value, a.source);
  if (!model.warnings.empty()) fmt::print(out, "\nwarnings\n");
  for (const std::string& warning : model.warnings) fmt::print(out, "  {}\n", warning);
}

void print_text(const ModelSpec& model, std::ostream& out) {
  fmt::print(out, "{} ({}{}{}), {}\n\n", model.name, model.family, model.title.empty() ? "" : ", ", model.title,
             model.source);
  print_sizes(model, out);
  print_work(model, out);
  print_states(model, out);
  print_tensors(model, out);
  print_notes(model, out);
}

// --- JSON -------------------------------------------------------------------------------------------

// Names may come from paths, which need not be UTF-8.
std::string dump(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

Json summary_json(const ModelSpec& model) {
  Json result;
  result["name"] = model.name;
  result["family"] = model.family;
  if (!model.title.empty()) result["title"] = model.title;
  result["source"] = model.source;
  result["parameters"] = model.parameters();
  result["trainable_parameters"] = model.trainable_parameters();
  result["active_parameters"] = model.active_parameters();
  result["layers"] = model.num_layers;
  result["hidden"] = model.hidden;
  if (heads_of(model) > 0) result["heads"] = heads_of(model);
  if (model.vocab > 0) result["vocab"] = model.vocab;
  if (model.max_positions > 0) result["max_positions"] = model.max_positions;
  if (model.vocab > 0) result["tied_embeddings"] = model.tied_embeddings;
  return result;
}

Json blocks_json(const ModelSpec& model) {
  const auto times = times_used(model);
  Json blocks = Json::array();
  for (std::size_t k = 0; k < model.kinds.size(); ++k) {
    const BlockKind& kind = model.kinds[k];
    Json block;
    block["name"] = kind.name;
    block["count"] = times[k];
    block["parameters"] = kind.parameters();
    block["kept_bytes_per_token"] = {{"none", saved_bytes(kind, Recompute::none)},
                                     {"selective", saved_bytes(kind, Recompute::selective)},
                                     {"full", saved_bytes(kind, Recompute::full)}};
    blocks.push_back(std::move(block));
  }
  return blocks;
}

Json tensors_json(const ModelSpec& model) {
  Json tensors = Json::array();
  for (ListedTensor& tensor : list_tensors(model)) {
    Json entry;
    entry["name"] = std::move(tensor.name);
    entry["shape"] = std::move(tensor.shape);
    if (tensor.layer >= 0) entry["layer"] = tensor.layer;
    entry["tied"] = tensor.tied;
    tensors.push_back(std::move(entry));
  }
  return tensors;
}

/// One tensor a line: a large model has thousands.
void print_json(const ModelSpec& model, std::ostream& out) {
  Json result = summary_json(model);
  result["flops"] = {{"seq_len", shown_seq_len(model)},
                     {"training_per_token_causal", flops_per_token(model, AttentionCount::causal)},
                     {"training_per_token_full", flops_per_token(model, AttentionCount::full)}};
  result["blocks"] = blocks_json(model);
  if (const std::string source = facts_source(model); !source.empty()) result["facts_source"] = source;
  result["assumptions"] = Json::array();
  for (const Assumption& a : model.assumptions) {
    result["assumptions"].push_back({{"what", a.what}, {"value", a.value}, {"source", a.source}});
  }
  result["warnings"] = model.warnings;
  const Json tensors = tensors_json(model);
  std::string text = dump(result, 2);
  text.resize(text.find_last_of('}'));  // the tensors follow before the last brace
  while (text.back() == '\n') text.pop_back();
  text += ",\n  \"tensors\": [";
  const char* separator = "\n    ";
  for (const Json& tensor : tensors) {
    text += separator;
    text += dump(tensor, -1);
    separator = ",\n    ";
  }
  text += "\n  ]\n}\n";
  out << text;
}

}  // namespace

void print_models(std::ostream& out, bool json) {
  std::vector<ModelSpec> models;
  for (const std::string& name : model_names()) models.push_back(find_model(name));
  if (json) {
    Json list = Json::array();
    for (const ModelSpec& model : models) list.push_back(summary_json(model));
    out << dump(list, 2) << '\n';
    return;
  }
  std::size_t width = 0;
  for (const ModelSpec& model : models) width = std::max(width, model.name.size());
  fmt::print(out, "{:<{}}  {:<12}  {:>17}  {:>17}  {:>6}  {:>6}  {:>5}\n", "model", width, "family", "parameters",
             "active", "layers", "hidden", "heads");
  for (const ModelSpec& model : models) {
    fmt::print(out, "{:<{}}  {:<12}  {:>17}  {:>17}  {:>6}  {:>6}  {:>5}\n", model.name, width, model.family,
               format_count(model.parameters()), format_count(model.active_parameters()), model.num_layers,
               model.hidden, heads_of(model));
  }
}

void print_model(const ModelSpec& model, std::ostream& out, bool json) {
  if (json) {
    print_json(model, out);
  } else {
    print_text(model, out);
  }
}

}  // namespace zeroplan
