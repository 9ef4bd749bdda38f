// Measured steps of DeepSpeed and FSDP: our errors held down on copied rows, how rows are read, what is refused.

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "models/error.h"
#include "planner/csv_table.h"
#include "planner/validate.h"
#include "planner/validate_step_time.h"
#include "tests/catch.h"

namespace zeroplan::tests {
namespace {

std::string text_of(const std::string& name) {
  std::ifstream file(std::string(ZEROPLAN_TESTS_DIR) + "/data/" + name);
  std::ostringstream text;
  text << file.rdbuf();
  REQUIRE(text.str().size() > 100);
  return text.str();
}

Validation validated(const std::string& name) {
  Validation validation;
  validate_rows(text_of(name), name, validation);
  return validation;
}

const StepTimeTable& group_of(const Validation& validation, const std::string& group) {
  for (const StepTimeTable& table : validation.step_times)
    if (table.group == group) return table;
  throw std::runtime_error("no group " + group);
}

/// Fails with the row when a figure gets worse than it was (percent), or when it is no better than constant MFU.
void holds(const Validation& validation, const std::string& group, int rows, double mean, double p90) {
  const StepTimeTable& table = group_of(validation, group);
  CAPTURE(group, table.worst_line, table.worst_row);
  CHECK(table.rows == rows);
  CHECK(100 * table.mean_error <= mean);
  CHECK(100 * table.p90_error <= p90);
  CHECK(table.mean_error < table.constant_mfu_error);
}

std::string quoted(const std::string& cell) {
  std::string out = "\"";
  for (const char c : cell) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + '"';
}

/// The copied table's first row of a kind, with some cells changed.
class Published {
 public:
  Published(const std::string& file, const std::string& marker) {
    std::istringstream lines(text_of("published/" + file));
    std::getline(lines, header_);
    for (std::string line; std::getline(lines, line);)
      if (row_.empty() && line.find(marker) != std::string::npos) row_ = line;
    REQUIRE(!row_.empty());
  }
  Published& set(const std::string& column, const std::string& value) {
    const CsvTable table = CsvTable::parse(header_ + "\n" + row_ + "\n", "row");
    std::string changed;
    std::istringstream names(header_);
    std::size_t i = 0;
    for (std::string name; std::getline(names, name, ','); ++i)
      changed += (i == 0 ? "" : ",") + quoted(name == column ? value : table.rows()[0].cells[i]);
    row_ = changed;
    return *this;
  }
  MeasuredSteps read() const { return read_published_steps(header_ + "\n" + row_ + "\n", "row"); }
  MeasuredStep step() const {
    const MeasuredSteps steps = read();
    if (!steps.skipped.empty()) FAIL(steps.skipped[0].reason);
    return steps.steps.at(0);
  }
  std::string reason() const {
    const MeasuredSteps steps = read();
    CHECK(steps.steps.empty());
    return steps.skipped.empty() ? "" : steps.skipped[0].reason;
  }

 private:
  std::string header_, row_;
};

Published mosaic() { return {"mosaicml_steps.csv", "torch 2.1.0 cu121"}; }
Published titan() { return {"torchtitan_steps.csv", "per-op SAC"}; }
Published azure() { return {"deepspeed_steps.csv", "2022-07,GPT 175B"}; }

}  // namespace

TEST_CASE("Steps of published MosaicML runs are predicted to 3 percent") {
  const Validation validation = validated("published/mosaicml_steps.csv");
  holds(validation, "MosaicML A100", 44, 3, 5);
  holds(validation, "MosaicML H100", 7, 3.5, 6);
}

TEST_CASE("Steps of published torchtitan runs are predicted to 7 percent, with fp8 or tensor parallelism to 11") {
  const Validation validation = validated("published/torchtitan_steps.csv");
  holds(validation, "torchtitan bf16 without TP", 18, 7, 17);
  holds(validation, "torchtitan fp8 or TP", 9, 11, 34);
}

TEST_CASE("Steps of published DeepSpeed runs are predicted to 13 percent") {
  const Validation validation = validated("published/deepspeed_steps.csv");
  holds(validation, "DeepSpeed, batch and shape stated", 28, 13, 30);
}

TEST_CASE("Phases of the measured H200 runs are predicted to 5 percent, ZeRO-3's hooks to 15") {
  const Validation deepspeed = validated("groundtruth/deepspeed_h200.jsonl");
  holds(deepspeed, "more than 4096 tokens", 5, 4, 9);
  holds(deepspeed, "at most 4096 tokens", 22, 5, 12);
  holds(deepspeed, "ZeRO-3, hooks on the host", 21, 15, 30);
  const Validation fsdp2 = validated("groundtruth/fsdp2_h200.jsonl");
  holds(fsdp2, "more than 4096 tokens", 14, 2.5, 6);
  holds(fsdp2, "at most 4096 tokens", 22, 5, 10);
}

TEST_CASE("Rows that cannot be predicted are counted with their reason") {
  const Validation validation = validated("published/torchtitan_steps.csv");
  CHECK(validation.rows == group_of(validation, "all").rows + static_cast<int>(validation.unpredicted.size()));
  CHECK_THAT(titan().set("model", "Mixtral-8x7B").reason(), HasText("MoE"));
  CHECK_THAT(titan().set("pp", "4").reason(), HasText("pipeline"));
  CHECK_THAT(titan().set("cp", "2").reason(), HasText("context"));
  CHECK_THAT(titan().set("micro_batch", "").reason(), HasText("micro_batch not stated"));
  CHECK_THAT(titan().set("micro_batch", "two").reason(), HasText("expected a number"));
  CHECK_THAT(titan().set("seq_len", "").reason(), HasText("seq_len not stated"));
  CHECK_THAT(titan().set("status", "oom").reason(), HasText("oom"));
  CHECK_THAT(titan().set("precision", "mxfp8_cublas").reason(), HasText("mxfp8"));
  CHECK_THAT(titan().set("attn_impl", "flex").reason(), HasText("FlexAttention"));
  CHECK_THAT(titan().set("gpu", "B200 (power limited)").reason(), HasText("power-limited"));
  CHECK_THAT(titan().set("gpu", "TPU v4").reason(), HasText("unknown GPU"));
  CHECK_THAT(titan().set("framework", "MaxText").reason(), HasText("engine not modelled: MaxText"));
  CHECK_THAT(titan().set("hidden", "").reason(), HasText("hidden not stated"));
  CHECK_THAT(titan().set("n_params", "5e9").reason(), HasText("the row says"));
  CHECK_THAT(titan().set("n_gpus", "12").reason(), HasText("whole nodes"));
  CHECK_THAT(titan().set("offload_activation", "cpu").reason(), HasText("activation offload"));
  CHECK_THAT(azure().set("offload_optimizer", "nvme").reason(), HasText("nvme"));
}

TEST_CASE("A published row becomes the run that it describes") {
  const MeasuredStep llama = titan().step();
  CHECK(llama.run.engine == TimedEngine::fsdp2);
  CHECK(llama.run.recompute == TimedRecompute::selective);
  CHECK(llama.run.reduction == DType::fp32);
  CHECK(llama.model->parameters() == 8030261248);
  CHECK(llama.run.tokens.seq_len == 8192);
  CHECK(titan().set("ac_detail", "every 2nd layer").step().run.recompute == TimedRecompute::second_layer);
  CHECK(titan().set("compile", "per-TransformerBlock torch.compile").step().run.stack == KernelStack::compiled_blocks);
  const MeasuredStep tensor = titan().set("tp", "2").step();
  CHECK(tensor.run.ranks * 2 == tensor.machine.ranks());

  const MeasuredStep mpt = mosaic().step();
  CHECK(mpt.run.engine == TimedEngine::fsdp1);
  CHECK(mpt.run.optimizer == OptimizerSoftware::decoupled);
  CHECK(mpt.run.early_stop);
  // 25 rows of March 2023 say "none" where hfu / mfu is 4 / 3.
  CHECK(mosaic().set("activation_checkpointing", "none").set("mfu", "0.3").set("hfu", "0.4").step().run.recompute ==
        TimedRecompute::full);
  CHECK(mosaic().set("activation_checkpointing", "full").set("mfu", "0.3").set("hfu", "0.3").step().run.recompute ==
        TimedRecompute::none);
  // 100 sequences on 8 ranks in micro-batches of 8: one of 8, one of 4.5 -> 12.5 is no whole number, 104 is 13.
  const MeasuredStep odd = mosaic().set("n_gpus", "8").set("global_batch", "104").set("micro_batch", "8").step();
  CHECK(odd.run.accumulation == 1);
  CHECK(odd.run.remainder_batch == 5);

  const MeasuredStep gpt = azure().step();
  CHECK(gpt.run.stage == 3);
  CHECK(gpt.run.offload_optimizer == OffloadedOptimizer::host);
  CHECK(gpt.run.offload_activations);
  CHECK(gpt.run.attention == AttentionSoftware::unfused);
  CHECK(gpt.machine.network.bandwidth.base() == Approx(200e9));  // 200 Gb/s for each of eight GPUs
  CHECK(azure().set("interconnect", "4x100 Gb/s IB per node").step().machine.network.bandwidth.base() == Approx(50e9));
}

TEST_CASE("A step is taken from seconds, else from a rate, else from TFLOPS") {
  const double tokens = 8192.0 * static_cast<double>(titan().step().run.tokens.batch);
  CHECK(titan().set("step_time_s", "1.5").step().measured.base() == 1.5);
  CHECK(titan().set("step_time_s", "").set("tokens_per_s_per_gpu", "1000").step().measured.base() ==
        Approx(tokens / 1000));
  const MeasuredStep samples =
      titan().set("step_time_s", "").set("tokens_per_s_per_gpu", "").set("samples_per_s", "10").step();
  CHECK(samples.measured.base() == Approx(static_cast<double>(samples.run.tokens.batch * samples.run.ranks) / 10));
  const MeasuredStep flops = titan()
                                 .set("step_time_s", "")
                                 .set("tokens_per_s_per_gpu", "")
                                 .set("samples_per_s", "")
                                 .set("tflops_per_gpu", "300")
                                 .step();
  CHECK(flops.measured.base() == Approx(6 * 8030261248.0 * tokens / 300e12));
}

TEST_CASE("Phases of a run give the sum of medians, without the first step") {
  GroundtruthSteps reader;
  const auto read = [&](const std::string& phases) {
    const JsonDocument document = JsonDocument::parse(
        R"({"model": "tinyllama-1.1b", "n": 8, "seq": 128, "mb": 2, "stage": 1, "phase_s": )" + phases + "}", "row");
    return reader.read(document.root(), "row");
  };
  CHECK(read("[[9,9,9],[1,2,3],[2,2,4],[3,1,9]]")->measured.base() == Approx(2 + 2 + 4));
  CHECK(read("[[9,9,9],[1,2,3],[2,4,3]]")->measured.base() == Approx(1.5 + 3 + 3));
  CHECK_FALSE(read("[[9,9,9]]").has_value());
  CHECK_THROWS_WITH(read("[[9,9,9],[1,2]]"), HasText("forward, backward and update"));
  CHECK(read("[[9,9,9],[1,2,3]]")->groups == std::vector<std::string>{"at most 512 tokens"});
}

TEST_CASE("CSV keeps commas, quotes and newlines inside quotes, and says where it is broken") {
  const CsvTable table = CsvTable::parse("a,b\n\"1,\"\"x\"\"\",\"two\nlines\"\r\n3,4", "file.csv");
  REQUIRE(table.rows().size() == 2);
  CHECK(table.at(table.rows()[0], "a") == "1,\"x\"");
  CHECK(table.at(table.rows()[0], "b") == "two\nlines");
  CHECK(table.rows()[1].line == 4);
  CHECK_THROWS_WITH(table.at(table.rows()[0], "c"), HasText("\"c\""));
  const CsvTable cut = CsvTable::parse("a,b\n1\n", "file.csv");
  CHECK_THROWS_WITH(cut.at(cut.rows()[0], "a"), HasText("file.csv:2: expected 2 cells, found 1"));
  CHECK_THROWS_WITH(CsvTable::parse("a,a\n", "file.csv"), HasText("twice"));
  const MeasuredSteps steps = read_published_steps("row_id,source_id,model,framework,gpu,n_gpus\na,b,c\n", "cut.csv");
  REQUIRE(steps.skipped.size() == 1);
  CHECK_THAT(steps.skipped[0].reason, HasText("fewer cells"));
  CHECK_THROWS_WITH(CsvTable::parse("a,b\n1,\"2\n", "file.csv"), HasText("closing quote"));
}

TEST_CASE("A table of another kind has no steps, and a column that is missing is not stated") {
  const MeasuredSteps other = read_published_steps("row_id,source_id,value\na,b,3\nc,d,4\n", "hardware.csv");
  CHECK(other.rows == 2);
  REQUIRE(other.skipped.size() == 2);
  CHECK(other.skipped[1].line == 3);
  CHECK_THAT(other.skipped[1].reason, HasText("no column \"model\""));
  const MeasuredSteps few = read_published_steps(
      "row_id,source_id,model,framework,gpu,n_gpus,status\na,b,Llama,DeepSpeed,H100,8,ok\n", "few.csv");
  REQUIRE(few.skipped.size() == 1);
  CHECK_THAT(few.skipped[0].reason, HasText("not stated"));
}

TEST_CASE("Published rows with anything in any cell are read or refused with a reason") {
  std::mt19937 random(11);
  const char* texts[] = {"",    "0",       "-1",   "1e99", "nan",  "none", "x",   "8",
                         "0.5", "1000000", "full", "cpu",  "fp16", "GPT",  "\xff"};
  for (const char* file : {"mosaicml_steps.csv", "torchtitan_steps.csv", "deepspeed_steps.csv"}) {
    const std::string text = text_of(std::string("published/") + file);
    const std::string header = text.substr(0, text.find('\n') + 1);
    const CsvTable table = CsvTable::parse(text, file);
    for (int round = 0; round < 400; ++round) {
      const CsvTable::Row& row = table.rows()[random() % table.rows().size()];
      std::string changed;
      const std::size_t first = random() % row.cells.size(), second = random() % row.cells.size();
      for (std::size_t i = 0; i < row.cells.size(); ++i) {
        const bool here = i == first || i == second;
        changed += (i == 0 ? "" : ",") + quoted(here ? texts[random() % std::size(texts)] : row.cells[i]);
      }
      CAPTURE(changed);
      MeasuredSteps steps;
      CHECK_NOTHROW(steps = read_published_steps(header + changed + "\n", "row"));
      std::vector<StepTimeTable> tables;
      CHECK_NOTHROW(tables = step_time_tables("row", steps.steps, steps.skipped));
      for (const StepTimeTable& each : tables) {
        CHECK(std::isfinite(each.worst_predicted.base()));
        CHECK(std::isfinite(each.mean_error));
      }
    }
  }
}

TEST_CASE("Step times stand in both outputs of validate") {
  const Validation validation = validated("published/mosaicml_steps.csv");
  CHECK_THAT(validation_text(validation), HasText("step_seconds"));
  const auto json = nlohmann::json::parse(validation_json(validation));
  int tables = 0;
  for (const auto& table : json["tables"]) {
    if (table["quantity"] != "step_seconds") continue;
    ++tables;
    CHECK(table["mape"].get<double>() > 0);
    CHECK(table["p90"].get<double>() >= table["mape"].get<double>() * 0.5);
    CHECK(table["constant_mfu_mape"].get<double>() > table["mape"].get<double>());
  }
  CHECK(tables == 3);
}

}  // namespace zeroplan::tests
