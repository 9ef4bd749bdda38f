// fit_efficiency GEMM_SHAPES.csv ATTENTION.csv OUT_FOLDER: refits models/catalog/fits/{gemm_shapes,attention}.json and
// prints the residuals. The first file has the columns of data/published/hardware_gemm_shapes.csv, the second those of
// tests/data/attention_h200.csv. Left out and counted: rows with an efficiency above 1, a value kind of "recalled", and
// rows of gpu_sweep with a size that is no multiple of 8 (an unpadded vocabulary takes other, several times slower
// kernels).

#include <fmt/format.h>

#include <cmath>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "sim/efficiency_fit.h"
#include "sim/kernel_shapes.h"

namespace {

using namespace zeroplan;

using Row = std::map<std::string, std::string>;

std::vector<std::string> split_csv(const std::string& line) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (const char c : line) {
    if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      cells.emplace_back();
    } else if (c != '\r') {
      cells.back() += c;
    }
  }
  return cells;
}

std::vector<Row> read_csv(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw std::runtime_error(path + ": cannot be read");
  std::string line;
  std::getline(in, line);
  const std::vector<std::string> names = split_csv(line);
  std::vector<Row> rows;
  while (std::getline(in, line)) {
    const std::vector<std::string> cells = split_csv(line);
    Row row;
    for (std::size_t i = 0; i < names.size() && i < cells.size(); ++i) row[names[i]] = cells[i];
    rows.push_back(std::move(row));
  }
  return rows;
}

/// "ng=160, M=154, stage=fwd" -> fields.
Row fields_of(const std::string& text) {
  Row fields;
  for (const std::string& part : split_csv(text)) {
    const auto equals = part.find('=');
    if (equals == std::string::npos) continue;
    fields[part.substr(part.find_first_not_of(' '), equals - part.find_first_not_of(' '))] = part.substr(equals + 1);
  }
  return fields;
}

struct Card {
  std::string arch;
  int num_sms;
  double memory_bandwidth;  // bytes/s, spec sheet
  double matmul;            // FLOP/s, best sustained (MAMF table of ml-engineering)
};

const std::map<std::string, Card> kCards = {{"A100-80GB PCIe", {"Ampere", 108, 1935e9, 252.9e12}},
                                            {"B200", {"Blackwell", 148, 8000e9, 1745e12}},
                                            {"H200", {"Hopper", 132, 4800e9, 794.5e12}}};

/// Engine's matmuls over the sustained rate with the Ampere curve: A100 0.87, H200 0.89, llmq on H100 0.89
/// (step-time.md section 2, "current software").
constexpr double kEngineFraction = 0.88;

bool timed_on_device(const Row& row) { return row.at("source_id") == "gpu_sweep"; }

bool unaligned(const Row& row) {
  if (!timed_on_device(row)) return false;
  constexpr int kAligned = 8;  // 16 bytes
  for (const char* size : {"m", "n", "k"})
    if (std::stoll(row.at(size)) % kAligned != 0) return true;
  return false;
}

/// "Llama-2 7B gate+up" -> "gate+up": gpu_sweep names the model first.
std::string role_of(const std::string& locator) {
  for (const std::string model : {"Llama-2 7B ", "Llama-2 13B ", "Llama-2 70B ", "Llama-3 8B ", "Qwen2.5 0.5B ",
                                  "Qwen2.5 1.5B ", "GPT-2 XL ", "GPT-2 large ", "GPT-2 "})
    if (locator.starts_with(model)) return locator.substr(model.size());
  return locator;
}

std::optional<GemmMeasurement> gemm_row(const Row& row) {
  const Card& card = kCards.at(row.at("gpu"));
  GemmMeasurement out;
  out.gpu = row.at("gpu");
  out.role = role_of(row.at("locator"));
  out.efficiency = std::stod(row.at("efficiency"));
  out.peak = FlopsPerSecond(std::stod(row.at("peak_tflops")) * 1e12);
  out.num_sms = card.num_sms;
  out.memory_bandwidth = BytesPerSecond(card.memory_bandwidth);
  if (row.at("op") == "matmul") {
    out.groups = row.at("batch").empty() ? 1 : std::stoll(row.at("batch"));
    out.rows = std::stod(row.at("m"));
    out.columns = std::stod(row.at("n"));
    out.inner = std::stod(row.at("k"));
    out.fp32_output = row.at("out_dtype") == "fp32";
    out.accumulate = row.at("accumulate") == "True";
    return out;
  }
  if (row.at("op") != "group_matmul") return std::nullopt;
  const Row fields = fields_of(row.at("extra_key"));
  out.grouped = true;
  out.groups = std::stoll(fields.at("ng"));
  out.rows = std::stod(fields.at("M"));
  out.columns = std::stod(fields.at("N"));
  out.inner = std::stod(fields.at("K"));
  if (fields.at("stage") == "bwd_grad_w") {  // the tokens are summed over; the weight [N, K] is the output
    std::swap(out.rows, out.inner);
    std::swap(out.rows, out.columns);
    out.fp32_output = fields.at("main_grad_dtype") == "fp32";
    out.accumulate = fields.at("accumulate") == "True";
  }
  return out;
}

std::optional<AttentionMeasurement> attention_row(const Row& row) {
  if (row.at("op") != "sdp_fwd" && row.at("op") != "sdp_bwd") return std::nullopt;
  const Row fields = fields_of(row.at("extra_key"));
  AttentionMeasurement out;
  out.gpu = row.at("gpu");
  out.batch = std::stod(fields.at("batch"));
  out.seq = std::stod(fields.at("seq_len"));
  out.heads = std::stod(fields.at("head_num"));
  out.qk_dim = std::stod(fields.at("qk_head_dim"));
  out.v_dim = std::stod(fields.at("v_head_dim"));
  out.num_sms = kCards.at(out.gpu).num_sms;
  out.backward = row.at("op") == "sdp_bwd";
  // SimuMax counts full attention (an efficiency of 1 is half of the peak in executed FLOPs).
  out.counted = Flops(2 * out.seq * out.seq * (out.qk_dim + out.v_dim) * out.heads * out.batch *
                      (out.backward ? kAttentionBackwardFlops : 1));
  out.peak = FlopsPerSecond(std::stod(row.at("peak_tflops")) * 1e12);
  out.achieved = out.peak * std::stod(row.at("efficiency"));
  return out;
}

AttentionMeasurement cudnn_row(const Row& row) {
  AttentionMeasurement out;
  out.gpu = row.at("gpu");
  out.batch = std::stod(row.at("batch"));
  out.seq = std::stod(row.at("seq"));
  out.heads = std::stod(row.at("heads"));
  out.qk_dim = out.v_dim = std::stod(row.at("head_dim"));
  out.num_sms = kCards.at(out.gpu).num_sms;
  out.backward = row.at("direction") == "backward";
  out.counted = Flops(out.seq * out.seq * (out.qk_dim + out.v_dim) * out.heads * out.batch *
                      (out.backward ? kAttentionBackwardFlops : 1));
  out.peak = FlopsPerSecond(std::stod(row.at("peak_tflops")) * 1e12);
  out.achieved = FlopsPerSecond(std::stod(row.at("tflops")) * 1e12);
  return out;
}

void print(const std::string& what, const FitQuality& q) {
  fmt::print("{:42} n {:4}  MAPE {:5.1f} %  p90 {:5.1f} %  max {:5.1f} %\n", what, q.rows, 100 * q.mean, 100 * q.p90,
             100 * q.max);
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out) throw std::runtime_error(path.string() + ": cannot be written");
}

const std::string kSweptGpu = "H200";  // the card of docs/measurements

std::string source_of(const std::string& gpu) {
  if (gpu == kSweptGpu)
    return "measured: tests/tools/gpu_sweep.cu, H200, 2026-11-30, cuBLASLt 13.1; no grouped rows, the factor is "
           "Blackwell's";
  return "SimuMax measured efficiency table, " + gpu + " (hardware_gemm_shapes.csv)";
}

void print(const GemmShapeCurve& curve, const std::vector<GemmMeasurement>& rows) {
  const Card& card = kCards.at(rows.front().gpu);
  fmt::print(
      "{}: ceiling {:.3f} of peak = {:.3f} of the sustained matmul rate, k ramp {:.1f}, tile exponent {:.3f}, "
      "fp32 {:+.1f} %, memory {:.2f}, start {:.2f} us, grouped {:.2f}, engine {:.3f}\n",
      curve.arch, curve.ceiling, curve.ceiling * rows.front().peak.base() / card.matmul, curve.k_ramp,
      curve.tile_exponent, 100 * curve.fp32_penalty, curve.memory_fraction, curve.start.base() * 1e6,
      curve.grouped_factor, curve.engine_fraction);
  print("  matmul, fitted rows", curve.quality);
  print("  matmul, 5-fold cross-validated", cross_validated(rows));
  if (curve.timed_on_device) print("  matmul, each layer role held out", cross_validated_by_role(rows));
  print("  grouped matmul, one factor", curve.grouped_quality);
}

/// Ampere, Blackwell and Hopper, in the order of their cards' names.
std::vector<GemmShapeCurve> fit_gemms(const std::map<std::string, std::vector<GemmMeasurement>>& by_gpu) {
  std::vector<GemmShapeCurve> curves;
  for (const auto& [gpu, rows] : by_gpu) {
    GemmShapeCurve curve = fit_gemm_curve(kCards.at(gpu).arch, rows, source_of(gpu));
    curve.engine_fraction = kEngineFraction;
    if (gpu == kSweptGpu) {
      curve.timed_on_device = true;
      curve.engine_fraction = converted_engine_fraction(curves.at(0), curve, rows);
      curve.grouped_factor = curves.at(1).grouped_factor;  // the other architecture with a flat curve; 65 rows
    }
    print(curve, rows);
    curves.push_back(curve);
  }
  for (const GemmShapeCurve& curve : curves)
    for (const auto& [gpu, rows] : by_gpu) print("  curve " + curve.arch + " on " + gpu, transfer_quality(curve, rows));
  return curves;
}

std::vector<AttentionCurve> fit_attention(std::map<std::string, std::vector<AttentionMeasurement>> by_gpu) {
  AttentionCurve hopper = fit_attention_curve("Hopper", by_gpu.at("H200"),
                                              "cuDNN 9.19 on H200, cudnn-frontend benchmark (runtime.md section 4)");
  // Head size 64 reaches 350 / 300 TFLOP/s where 128 reaches 644 / 541 (runtime.md section 4).
  hopper.head_dim_exponent = std::log2((644.0 / 350 + 541.0 / 300) / 2);
  std::vector<AttentionCurve> curves;
  for (const std::string gpu : {"A100-80GB PCIe", "B200"}) {
    curves.push_back(fit_attention_curve(kCards.at(gpu).arch, by_gpu.at(gpu),
                                         "SimuMax measured efficiency table, " + gpu +
                                             " (hardware_gemm_shapes.csv, sdp rows, full FLOPs counted there)"));
  }
  curves.back().head_dim_exponent = hopper.head_dim_exponent;
  curves.push_back(hopper);
  curves[0].sustained = kCards.at("A100-80GB PCIe").matmul / 312e12;
  curves[1].sustained = kCards.at("B200").matmul / 2250e12;
  curves[2].sustained = kCards.at("H200").matmul / 989e12;
  for (const AttentionCurve& curve : curves) {
    fmt::print("{}: forward {:.3f}, backward {:.3f}, block path {:.2f} / {:.2f} tiles\n", curve.arch, curve.forward,
               curve.backward, curve.block_path_forward, curve.block_path_backward);
    print("  forward", curve.quality_forward);
    print("  backward", curve.quality_backward);
  }
  return curves;
}

int fit(const std::string& gemm_csv, const std::string& attention_csv, const std::filesystem::path& folder) {
  std::map<std::string, std::vector<GemmMeasurement>> gemms;
  std::map<std::string, std::vector<AttentionMeasurement>> attention;
  int above_one = 0, recalled = 0, not_aligned = 0;
  for (const Row& row : read_csv(gemm_csv)) {
    if (row.at("value_kind").find("recalled") != std::string::npos) {
      ++recalled;
    } else if (std::stod(row.at("efficiency")) > 1) {
      ++above_one;
    } else if (unaligned(row)) {
      ++not_aligned;
    } else if (const auto gemm = gemm_row(row)) {
      gemms[gemm->gpu].push_back(*gemm);
    } else if (const auto call = attention_row(row)) {
      attention[call->gpu].push_back(*call);
    }
  }
  for (const Row& row : read_csv(attention_csv)) attention[row.at("gpu")].push_back(cudnn_row(row));
  fmt::print("left out: {} rows with an efficiency above 1, {} recalled, {} with a size that is no multiple of 8\n",
             above_one, recalled, not_aligned);
  write(folder / "gemm_shapes.json", write_gemm_curves(fit_gemms(gemms)));
  write(folder / "attention.json", write_attention_curves(fit_attention(attention)));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    fmt::print(stderr, "usage: fit_efficiency GEMM_SHAPES.csv ATTENTION.csv OUT_FOLDER\n");
    return 2;
  }
  try {
    return fit(argv[1], argv[2], argv[3]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "fit_efficiency: {}\n", error.what());
    return 1;
  }
}
