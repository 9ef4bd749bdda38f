#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "models/error.h"
#include "planner/validate_step_time_rows.h"

namespace zeroplan {
namespace {

/// Where the network is not stated: a NIC of the time for each GPU, eight at most, all together (step-time.md
/// prototype).
BytesPerSecond usual_network(const GpuSpec& gpu, int gpus_per_node) {
  const int nics = std::min(8, gpus_per_node);
  if (gpu.arch == "Volta") return 12.5_GBps * nics;   // DGX-2: eight of 100 Gb/s
  if (gpu.arch == "Ampere") return 25.0_GBps * nics;  // DGX A100: eight of 200 Gb/s
  return 50.0_GBps * nics;                            // eight of 400 Gb/s
}

/// "1600 Gbps RoCE node-node", "4x100 Gb/s IB per node", "400 Gb/s RDMA per GPU": bytes per second of a node.
std::optional<BytesPerSecond> stated_network(std::string_view text, int gpus_per_node) {
  std::size_t unit = text.find(" Gb");
  if (unit == std::string_view::npos || unit == 0) return std::nullopt;
  std::size_t start = unit;
  while (start > 0 && (std::isdigit(static_cast<unsigned char>(text[start - 1])) != 0 || text[start - 1] == 'x'))
    --start;
  double product = 1;
  for (std::string_view part = text.substr(start, unit - start); !part.empty();) {
    double value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc{}) return std::nullopt;
    product *= value;
    part.remove_prefix(static_cast<std::size_t>(end - part.data()));
    if (!part.empty()) part.remove_prefix(1);
  }
  if (text.find("per GPU") != std::string_view::npos) product *= gpus_per_node;
  return BytesPerSecond(product * 1e9 / 8);
}

/// The catalog's GPU of a row. H100-96GB is torchtitan's card: HBM2e at 2.4 TB/s, held to 500 W.
GpuSpec gpu_of(const std::string& text) {
  if (text.find("power limited") != std::string::npos)
    throw InputError(fmt::format("{}: power-limited cards are not modelled", text));
  if (text == "H100-96GB") {
    GpuSpec gpu = find_gpu("H100-SXM5-80GB");
    gpu.name = "H100-96GB";
    gpu.memory_bandwidth = 2400.0_GBps;
    gpu.memory = 95.0_GiB;  // as torchtitan's logs print it (column gpu_mem_gb)
    return gpu;
  }
  if (text == "V100") return find_gpu("V100-SXM2-32GB");
  std::string name = text;
  for (const std::string_view written : {"RTX 4090-24GB", "RTX A6000-48GB"}) {
    if (text == written) name = std::string(written.substr(0, written.rfind('-')));
  }
  std::replace(name.begin(), name.end(), ' ', '-');
  return find_gpu(parse_gpu_request("1x" + name).gpu);
}

std::int64_t nearest_multiple(double value, std::int64_t of) {
  return std::max<std::int64_t>(1, std::llround(value / static_cast<double>(of))) * of;
}

nlohmann::ordered_json gpt_config(const Cells& cells, std::string_view type) {
  constexpr double kAspect = 128;  // hidden over layers, and the head size
  double layers = cells.number("n_layers", 0);
  double hidden = cells.number("hidden", 0);
  if (layers == 0 || hidden == 0) {
    const double parameters = cells.number("n_params");
    if (layers == 0) layers = std::cbrt(parameters / (12 * kAspect * kAspect));
    layers = std::round(layers);
    hidden = static_cast<double>(nearest_multiple(std::sqrt(parameters / (12 * layers)), 128));
  }
  const auto h = static_cast<std::int64_t>(hidden);
  constexpr std::int64_t kMegatronVocabulary = 51200;
  nlohmann::ordered_json config;
  config["model_type"] = type;
  config["vocab_size"] = cells.integer("vocab", kMegatronVocabulary);
  config[type == "mpt" ? "d_model" : "n_embd"] = h;
  config[type == "mpt" ? "n_layers" : "n_layer"] = static_cast<std::int64_t>(layers);
  config[type == "mpt" ? "n_heads" : "n_head"] = cells.integer("n_heads", std::max<std::int64_t>(1, h / 128));
  config[type == "mpt" ? "max_seq_len" : "n_positions"] = cells.integer("seq_len", 2048);
  return config;
}

nlohmann::ordered_json gated_config(const Cells& cells) {
  const std::string& name = cells.text("model");
  const std::string_view type = name.starts_with("Qwen3") ? "qwen3" : name.starts_with("Qwen") ? "qwen2" : "llama";
  nlohmann::ordered_json config;
  config["model_type"] = type;
  config["hidden_size"] = cells.integer("hidden");
  config["intermediate_size"] = cells.integer("ffn_hidden");
  config["num_hidden_layers"] = cells.integer("n_layers");
  config["num_attention_heads"] = cells.integer("n_heads");
  config["num_key_value_heads"] = cells.integer("n_kv_heads", cells.integer("n_heads"));
  if (cells.stated("head_dim") && type != "qwen2") config["head_dim"] = cells.integer("head_dim");
  config["vocab_size"] = cells.integer("vocab");
  config["max_position_embeddings"] = std::max<std::int64_t>(cells.integer("seq_len", 4096), 4096);
  config["tie_word_embeddings"] = cells.text("tied_embeddings") == "1";
  return config;
}

nlohmann::ordered_json pythia_config(const Cells& cells) {
  nlohmann::ordered_json config;
  config["model_type"] = "gpt_neox";
  config["hidden_size"] = cells.integer("hidden");
  config["intermediate_size"] = cells.integer("ffn_hidden", 4 * cells.integer("hidden"));
  config["num_hidden_layers"] = cells.integer("n_layers");
  config["num_attention_heads"] = cells.integer("n_heads");
  config["vocab_size"] = cells.integer("vocab", 50304);
  config["max_position_embeddings"] = 2048;
  config["rotary_pct"] = 0.25;
  config["tie_word_embeddings"] = false;
  return config;
}

}  // namespace

const std::string& Cells::text(std::string_view column) const {
  static const std::string kNone;
  return table_.has(column) ? table_.at(row_, column) : kNone;
}

bool Cells::contains(std::string_view column, std::string_view part) const {
  return text(column).find(part) != std::string::npos;
}

double Cells::number(std::string_view column) const {
  const std::string& cell = text(column);
  if (cell.empty()) throw InputError(fmt::format("{} not stated", column));
  double value = 0;
  const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
  if (error != std::errc{} || end != cell.data() + cell.size() || !std::isfinite(value))
    throw InputError(fmt::format("{}: expected a number, found \"{}\"", column, cell));
  return value;
}

double Cells::number(std::string_view column, double otherwise) const {
  return stated(column) ? number(column) : otherwise;
}

std::int64_t Cells::integer(std::string_view column) const {
  const double value = number(column);
  if (value < 0 || value > 1e15 || value != std::floor(value))
    throw InputError(fmt::format("{}: expected a whole number, found \"{}\"", column, text(column)));
  return static_cast<std::int64_t>(value);
}

std::int64_t Cells::integer(std::string_view column, std::int64_t otherwise) const {
  return stated(column) ? integer(column) : otherwise;
}

std::string config_of(const Cells& cells) {
  const std::string& name = cells.text("model");
  if (cells.contains("ffn_type", "swiglu") || cells.contains("ffn_type", "3-matrix")) return gated_config(cells).dump();
  if (name.starts_with("MPT")) {
    nlohmann::ordered_json config = gpt_config(cells, "mpt");
    config["no_bias"] = true;
    config["attn_config"] = {{"alibi", false}};
    return config.dump();
  }
  if (name.starts_with("pythia")) return pythia_config(cells).dump();
  const bool gpt = name.starts_with("GPT") || name.starts_with("gpt");
  if (!gpt) throw InputError("architecture not stated");
  nlohmann::ordered_json config = gpt_config(cells, "gpt2");
  if (cells.stated("ffn_hidden")) config["n_inner"] = cells.integer("ffn_hidden");
  return config.dump();
}

std::optional<ModelSpec> catalog_model_of(const Cells& cells) {
  std::string name = cells.text("model");
  name = name.substr(name.rfind('/') + 1);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (name.starts_with("bloomz")) name.erase(5, 1);  // BLOOM, trained further
  const std::vector<std::string> known = model_names();
  if (std::find(known.begin(), known.end(), name) == known.end()) return std::nullopt;
  return find_model(name);
}

MachineSpec machine_of(const Cells& cells, const std::optional<GpuSpec>& card) {
  MachineSpec machine;
  machine.gpu = card ? *card : gpu_of(cells.text("gpu"));
  const auto gpus = static_cast<int>(cells.integer("n_gpus"));
  if (gpus < 1) throw InputError("n_gpus: expected at least 1");
  machine.gpus_per_node = static_cast<int>(std::min<std::int64_t>(gpus, cells.integer("gpus_per_node", 8)));
  if (gpus % machine.gpus_per_node != 0)
    throw InputError(fmt::format("{} GPUs are no whole nodes of {}", gpus, machine.gpus_per_node));
  machine.nodes = gpus / machine.gpus_per_node;
  machine.name = fmt::format("{} x {}", gpus, cells.text("gpu"));
  const bool nvlink = machine.gpu.nvlink > BytesPerSecond();
  machine.interconnect = machine.gpus_per_node == 1 ? Interconnect::single
                         : nvlink                   ? Interconnect::nvswitch
                                                    : Interconnect::root_complex;
  machine.nvlink = machine.gpu.nvlink;
  machine.sockets = 2;
  if (machine.nodes > 1) {
    machine.network.nics = machine.gpus_per_node;
    machine.network.bandwidth = stated_network(cells.text("interconnect"), machine.gpus_per_node)
                                    .value_or(usual_network(machine.gpu, machine.gpus_per_node));
    machine.network.kind = cells.contains("interconnect", "Omni-Path") ? "Omni-Path" : "InfiniBand";
    machine.network.gpudirect = true;
  }
  return machine;
}

}  // namespace zeroplan
