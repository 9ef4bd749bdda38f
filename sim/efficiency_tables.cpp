#include "sim/efficiency_tables.h"

#include <fmt/format.h>

#include <stdexcept>

#include "models/catalog.h"
#include "models/json_reader.h"

namespace zeroplan {

namespace {

constexpr double kMaxRatio = 10;       // no efficiency, factor or exponent in these files is larger
constexpr double kMaxRamp = 1e5;       // elements of k
constexpr double kMaxSustained = 1.5;  // cards may boost above the clock of their datasheet
constexpr double kMaxStartUs = 100;
constexpr int kMaxRows = 1'000'000;

FitQuality read_quality(const JsonValue& value) {
  value.require_only({"rows", "mean", "p90", "max"});
  return {static_cast<int>(value.at("rows").as_int(0, kMaxRows)), value.at("mean").as_real(0, kMaxRatio),
          value.at("p90").as_real(0, kMaxRatio), value.at("max").as_real(0, kMaxRatio)};
}

GemmShapeCurve read_gemm_curve(const JsonValue& value) {
  value.require_only({"arch", "ceiling", "k_ramp", "tile_exponent", "fp32_penalty", "memory_fraction", "grouped_factor",
                      "engine_fraction", "start_us", "timed_on_device", "quality", "grouped_quality", "source"});
  GemmShapeCurve curve;
  curve.arch = value.at("arch").as_string();
  curve.ceiling = value.at("ceiling").as_real(1e-3, kMaxRatio);
  curve.k_ramp = value.at("k_ramp").as_real(0, kMaxRamp);
  curve.tile_exponent = value.at("tile_exponent").as_real(0, kMaxRatio);
  curve.fp32_penalty = value.at("fp32_penalty").as_real(0, kMaxRatio);
  curve.memory_fraction = value.at("memory_fraction").as_real(1e-3, 1);
  curve.grouped_factor = value.at("grouped_factor").as_real(1e-3, kMaxRatio);
  curve.engine_fraction = value.at("engine_fraction").as_real(1e-3, kMaxRatio);
  curve.start = Seconds(value.at("start_us").as_real(0, kMaxStartUs) * 1e-6);
  curve.timed_on_device = value.at("timed_on_device").as_bool();
  curve.quality = read_quality(value.at("quality"));
  curve.grouped_quality = read_quality(value.at("grouped_quality"));
  curve.source = value.at("source").as_string();
  return curve;
}

AttentionCurve read_attention_curve(const JsonValue& value) {
  value.require_only({"arch", "forward", "backward", "block_path_forward", "block_path_backward", "head_dim_exponent",
                      "sustained", "quality_forward", "quality_backward", "source"});
  AttentionCurve curve;
  curve.arch = value.at("arch").as_string();
  curve.forward = value.at("forward").as_real(1e-3, 1);
  curve.backward = value.at("backward").as_real(1e-3, 1);
  curve.block_path_forward = value.at("block_path_forward").as_real(0, kMaxRatio);
  curve.block_path_backward = value.at("block_path_backward").as_real(0, kMaxRatio);
  curve.head_dim_exponent = value.at("head_dim_exponent").as_real(0, kMaxRatio);
  curve.sustained = value.at("sustained").as_real(1e-3, 1);
  curve.quality_forward = read_quality(value.at("quality_forward"));
  curve.quality_backward = read_quality(value.at("quality_backward"));
  curve.source = value.at("source").as_string();
  return curve;
}

SustainedFraction read_sustained(const JsonValue& value) {
  value.require_only({"key", "fraction", "source"});
  return {value.at("key").as_string(), value.at("fraction").as_real(1e-3, kMaxSustained),
          value.at("source").as_string()};
}

template <class Row>
std::vector<Row> read_rows(std::string_view text, const std::string& name, std::string_view key,
                           Row (*read)(const JsonValue&)) {
  const JsonDocument document = JsonDocument::parse(text, name);
  document.root().require_only({"schema", key});
  document.root().at("schema").as_int(1, 1);
  std::vector<Row> rows;
  for (const JsonValue& item : document.root().at(key).items()) rows.push_back(read(item));
  return rows;
}

std::string quality_text(const FitQuality& quality) {
  return fmt::format(R"({{"rows": {}, "mean": {:.4f}, "p90": {:.4f}, "max": {:.4f}}})", quality.rows, quality.mean,
                     quality.p90, quality.max);
}

std::string document_of(std::string_view key, const std::vector<std::string>& rows) {
  return fmt::format("{{\n  \"schema\": 1,\n  \"{}\": [\n{}\n  ]\n}}\n", key, fmt::join(rows, ",\n"));
}

}  // namespace

EfficiencyTables read_efficiency_tables(std::string_view gemm_json, std::string_view attention_json,
                                        std::string_view sustained_json) {
  EfficiencyTables tables;
  tables.gemm = read_rows(gemm_json, "fits/gemm_shapes.json", "curves", read_gemm_curve);
  tables.attention = read_rows(attention_json, "fits/attention.json", "curves", read_attention_curve);
  tables.sustained = read_rows(sustained_json, "fits/sustained_matmul.json", "fractions", read_sustained);
  return tables;
}

std::string write_gemm_curves(std::span<const GemmShapeCurve> curves) {
  std::vector<std::string> rows;
  for (const GemmShapeCurve& curve : curves)
    rows.push_back(fmt::format(
        "    {{\"arch\": \"{}\", \"ceiling\": {:.4f}, \"k_ramp\": {:.1f}, \"tile_exponent\": {:.3f},\n"
        "     \"fp32_penalty\": {:.4f}, \"memory_fraction\": {:.3f}, \"grouped_factor\": {:.3f},\n"
        "     \"engine_fraction\": {:.3f}, \"start_us\": {:.2f}, \"timed_on_device\": {},\n"
        "     \"quality\": {},\n     \"grouped_quality\": {},\n     \"source\": \"{}\"}}",
        curve.arch, curve.ceiling, curve.k_ramp, curve.tile_exponent, curve.fp32_penalty, curve.memory_fraction,
        curve.grouped_factor, curve.engine_fraction, curve.start.base() * 1e6, curve.timed_on_device,
        quality_text(curve.quality), quality_text(curve.grouped_quality), curve.source));
  return document_of("curves", rows);
}

std::string write_attention_curves(std::span<const AttentionCurve> curves) {
  std::vector<std::string> rows;
  for (const AttentionCurve& curve : curves)
    rows.push_back(fmt::format(
        "    {{\"arch\": \"{}\", \"forward\": {:.4f}, \"backward\": {:.4f}, \"block_path_forward\": {:.3f},\n"
        "     \"block_path_backward\": {:.3f}, \"head_dim_exponent\": {:.2f}, \"sustained\": {:.3f},\n"
        "     \"quality_forward\": {},\n     \"quality_backward\": {},\n     \"source\": \"{}\"}}",
        curve.arch, curve.forward, curve.backward, curve.block_path_forward, curve.block_path_backward,
        curve.head_dim_exponent, curve.sustained, quality_text(curve.quality_forward),
        quality_text(curve.quality_backward), curve.source));
  return document_of("curves", rows);
}

const EfficiencyTables& builtin_efficiency_tables() {
  static const EfficiencyTables tables = [] {
    const auto text = [](std::string_view path) {
      const CatalogFile* file = find_catalog_file(path);
      if (file == nullptr) throw std::logic_error(fmt::format("no embedded catalog file {}", path));
      return file->text;
    };
    return read_efficiency_tables(text("fits/gemm_shapes.json"), text("fits/attention.json"),
                                  text("fits/sustained_matmul.json"));
  }();
  return tables;
}

}  // namespace zeroplan
