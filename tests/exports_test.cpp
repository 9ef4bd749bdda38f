#include "planner/exports.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>

#include "models/error.h"
#include "planner/export_deepspeed_choices.h"
#include "planner/export_parts.h"
#include "tests/catch.h"
#include "tests/child_process.h"

using namespace zeroplan;
using zeroplan::tests::HasText;

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

/// A folder of its own, removed at the end.
struct TemporaryFolder {
  tests::TemporaryDirectory directory;
  fs::path path = directory.path();
};

void write_file(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// Every key path DeepSpeed 0.19 knows, with the stages that read it.
const std::map<std::string, std::string>& known_keys() {
  static const std::map<std::string, std::string> keys = [] {
    std::map<std::string, std::string> read;
    const Json file = Json::parse(read_file(fs::path(ZEROPLAN_TESTS_DIR) / "data/deepspeed_keys.json"));
    for (const Json& key : file.at("keys"))
      read[key.at("path").get<std::string>()] = key.at("applies_to").get<std::string>();
    return read;
  }();
  return keys;
}

/// The paths of all leaves.
void leaves(const Json& value, const std::string& path, std::vector<std::string>& out) {
  if (!value.is_object()) {
    out.push_back(path);
    return;
  }
  for (const auto& [key, child] : value.items()) leaves(child, path.empty() ? key : path + "." + key, out);
}

const ExportFile* find(const std::vector<ExportFile>& files, const std::string& name) {
  for (const ExportFile& file : files) {
    if (file.name == name) return &file;
  }
  return nullptr;
}

Json deepspeed_of(const std::vector<ExportFile>& files) { return Json::parse(find(files, "deepspeed.json")->text); }

bool any_has(const std::vector<std::string>& notes, const std::string& part) {
  for (const std::string& note : notes) {
    if (note.find(part) != std::string::npos) return true;
  }
  return false;
}

struct Case {
  Candidate candidate;
  Answer answer;

  Plan& plan() { return candidate.plan; }
  std::vector<ExportFile> files() const {
    check_plan(candidate.plan, answer.request.model, "test");
    return export_files(candidate, answer);
  }
  std::vector<std::string> notes() const { return export_notes(candidate, answer); }
};

Case case_of(const std::string& model, const std::string& gpus, int nodes = 1) {
  Case c;
  c.answer.request.model = find_model(model);
  c.answer.request.machine = machine_for(parse_gpu_request(gpus), nodes);
  const int blocks = static_cast<int>(c.answer.request.model.sequence.size());
  c.plan().ranks = c.plan().shard_ranks = c.answer.request.machine.ranks();
  c.plan().zero_stage = 3;
  c.plan().optimizer = c.plan().parameters = Placement::all(Tier::hbm, blocks);
  c.candidate.prediction.gpu.capacity = c.answer.request.machine.gpu.memory;
  return c;
}

/// Random choices; most contradict each other, so the caller keeps what check_plan() lets pass.
class RandomPlans {
 public:
  explicit RandomPlans(unsigned seed) : random_(seed) {}

  bool draw(Case& c) {
    Plan& p = c.plan();
    p.zero_stage = pick(4);
    p.shard_ranks = p.zero_stage == 0 ? 1 : p.ranks >> pick(3);
    if (p.shard_ranks < 1) p.shard_ranks = 1;
    p.micro_batch = 1 << pick(4), p.accumulation = 1 + pick(9);
    p.seq_len = 512 << pick(4);
    precision(p);
    const int blocks = p.optimizer.total();
    p.optimizer = placement(blocks), p.parameters = placement(blocks);
    p.gradients = pick(2) ? Tier::hbm : Tier::host;
    p.update = pick(2) ? UpdateOn::host : UpdateOn::device;
    p.recompute = static_cast<Recompute>(pick(3));
    const int layers = static_cast<int>(c.answer.request.model.num_layers);
    p.recompute_layers = p.recompute == Recompute::none ? 0 : pick(2) ? layers : 1 + pick(layers);
    p.prefetch_layers = pick(4);
    p.reduce_each = p.zero_stage >= 2 || pick(2) ? ReduceEach::micro_step : ReduceEach::step;
    p.clip_norm = pick(2) ? 1.0 : 0.0;
    c.candidate.prediction.gpu.peak = c.candidate.prediction.gpu.capacity * (0.1 * pick(10));
    try {
      check_plan(p, c.answer.request.model, "random");
    } catch (const InputError&) {
      p.optimizer = p.parameters = Placement::all(Tier::hbm, blocks);
      return false;
    }
    return true;
  }

 private:
  int pick(int count) { return std::uniform_int_distribution<int>(0, count - 1)(random_); }
  Placement placement(int blocks) {
    const int kind = pick(6);
    if (kind < 3) return Placement::all(static_cast<Tier>(kind), blocks);
    if (kind == 3) return Placement::all(Tier::hbm, blocks);
    const int hbm = pick(blocks + 1), host = pick(blocks - hbm + 1);
    return {hbm, host, blocks - hbm - host};
  }
  void precision(Plan& p) {
    const DType types[] = {DType::bf16, DType::bf16, DType::fp16, DType::fp32};
    p.precision.weights = p.precision.gradients = types[pick(4)];
    p.precision.master = p.precision.weights != DType::fp32;
    p.precision.split_master = p.precision.weights == DType::bf16 && pick(4) == 0;
    p.precision.states = pick(5) == 0 ? DType::bf16 : DType::fp32;
    p.precision.accumulation = pick(2) ? DType::fp32 : p.precision.weights;
    p.loss_scaling = p.precision.weights == DType::fp16 ? LossScaling::dynamic : LossScaling::none;
  }
  std::mt19937 random_;
};

void check_deepspeed(const Json& json, const Plan& plan) {
  CHECK(json.at("train_batch_size").get<std::int64_t>() ==
        json.at("train_micro_batch_size_per_gpu").get<std::int64_t>() *
            json.at("gradient_accumulation_steps").get<std::int64_t>() * plan.ranks);
  const Json& zero = json.at("zero_optimization");
  const int stage = zero.at("stage").get<int>();
  CHECK(stage >= plan.zero_stage);
  std::vector<std::string> paths;
  leaves(json, "", paths);
  for (const std::string& path : paths) {
    INFO(path);
    REQUIRE(known_keys().count(path) == 1);
    const std::string& applies = known_keys().at(path);
    if (applies.rfind("stage 3", 0) == 0) CHECK(stage == 3);
    if (applies.rfind("stages 1-", 0) == 0) CHECK(stage >= 1);
  }
  CHECK(json.contains("bf16") == (plan.precision.weights == DType::bf16));
  CHECK(json.contains("fp16") == (plan.precision.weights == DType::fp16));
  // DeepSpeed refuses another accumulation type at stage 0, and at stage 1 it silently changes the optimizer class.
  if (json.contains("data_types")) CHECK(stage >= 2);
}

/// Sizes are non-negative integers and buffers hold what DeepSpeed asserts they hold.
void check_sizes(const Json& zero, const Case& c) {
  for (const auto& [key, value] : zero.items()) {
    if (key.ends_with("_size") || key.starts_with("stage3_")) {
      INFO(key);
      CHECK(value.is_number_integer());
      CHECK(value.get<std::int64_t>() >= 0);
    }
  }
  if (zero.contains("zero_hpz_partition_size")) {
    CHECK(c.candidate.plan.ranks % zero["zero_hpz_partition_size"].get<int>() == 0);
    CHECK(!zero.contains("offload_param"));
  }
  if (zero.contains("offload_optimizer")) {
    const Json& offload = zero["offload_optimizer"];
    CHECK((offload["device"] == "nvme") == offload.contains("nvme_path"));
    if (offload["device"] == "nvme") {
      CHECK(zero["stage"] == 3);
      CHECK(offload["buffer_count"].get<int>() >= 11);
    }
    if (offload.contains("ratio")) CHECK(offload["ratio"].get<double>() < 1);
  }
  if (!zero.contains("offload_param") || zero["offload_param"]["device"] != "nvme") return;
  const std::int64_t ranks = c.candidate.plan.ranks;
  for (const BlockKind& kind : c.answer.request.model.kinds) {
    for (const TensorSpec& tensor : kind.tensors) {
      const std::int64_t partition = (tensor.elements() / tensor.copies + ranks - 1) / ranks;
      CHECK(zero["offload_param"]["buffer_size"].get<std::int64_t>() >= partition);
    }
  }
}

/// Two-level maps of plain scalars: "key: value", two blanks of indent below a key without a value, no key twice.
void check_yaml(const std::string& yaml) {
  std::istringstream in(yaml);
  std::string line, section;
  std::set<std::string> seen;
  while (std::getline(in, line)) {
    if (line.starts_with("#")) continue;
    INFO(line);
    REQUIRE(line.find('\t') == std::string::npos);
    const std::size_t indent = line.find_first_not_of(' ');
    const std::size_t colon = line.find(':');
    REQUIRE(colon != std::string::npos);
    REQUIRE((indent == 0 || (indent == 2 && !section.empty())));
    const bool opens = colon + 1 == line.size();
    if (indent == 0) section = opens ? line.substr(0, colon) : "";
    REQUIRE((!opens || indent == 0));
    if (!opens) REQUIRE((line[colon + 1] == ' ' && colon + 2 < line.size()));
    CHECK(seen.insert(section + "/" + line.substr(indent, colon - indent)).second);
  }
  CHECK(seen.count("fsdp_config/fsdp_version") == 1);
}

}  // namespace

TEST_CASE("Random plans export files that DeepSpeed, accelerate and bash read") {
  TemporaryFolder folder;
  RandomPlans random(20261130);
  int exported = 0, written_yaml = 0;
  std::vector<Case> cases;
  cases.push_back(case_of("llama-2-70b", "4xA100-80G"));
  cases.push_back(case_of("llama-2-7b", "8xA100-80G", 2));
  cases.push_back(case_of("mixtral-8x7b", "8xH100", 4));
  cases.push_back(case_of("gpt2", "2x3090-24G"));
  for (int attempt = 0; attempt < 20000 && exported < 400; ++attempt) {
    Case& c = cases[static_cast<std::size_t>(attempt) % cases.size()];
    if (!random.draw(c)) continue;
    INFO(describe(c.candidate.plan));
    const std::vector<ExportFile> files = c.files();
    const Json json = deepspeed_of(files);
    check_deepspeed(json, c.candidate.plan);
    check_sizes(json.at("zero_optimization"), c);
    CHECK(read_plan(find(files, "plan.json")->text, "plan.json").plan == c.candidate.plan);
    if (const ExportFile* yaml = find(files, "accelerate_fsdp.yaml")) {
      check_yaml(yaml->text);
      ++written_yaml;
    } else {
      CHECK(any_has(c.notes(), "accelerate_fsdp.yaml: not written: "));
    }
    write_file(folder.path / fmt::format("launch{}.sh", exported++), find(files, "launch.sh")->text);
  }
  CHECK(exported == 400);
  CHECK(written_yaml > 10);
  const std::string check = fmt::format("for f in {}/*.sh; do bash -n \"$f\" || exit 1; done", folder.path.string());
  CHECK(std::system(fmt::format("bash -c '{}'", check).c_str()) == 0);
}

TEST_CASE("Hostile model names stay text in launch.sh") {
  TemporaryFolder folder;
  write_file(folder.path / "torchrun", "#!/bin/sh\nprintf '%s\\n' \"$@\" > \"$SEEN\"\n");
  fs::permissions(folder.path / "torchrun", fs::perms::owner_all);
  write_file(folder.path / "train.py", "");
  const std::string trap = (folder.path / "trap").string();
  for (const std::string& name :
       {std::string("it's \"70B\""), "a$(touch " + trap + ")b`touch " + trap + "`", "x'; touch " + trap + "; '",
        "line\ntouch " + trap + "\n#", std::string("caf\xc3\xa9 \\ ! ${HOME} * -n"), "u\xe2\x80\xa8touch " + trap}) {
    INFO(name);
    Case c = case_of("llama-2-7b", "4xA100-80G");
    c.answer.request.model.name = name;
    const std::vector<ExportFile> files = c.files();
    CHECK(find(files, "launch.sh")->executable);
    write_file(folder.path / "launch.sh", find(files, "launch.sh")->text);
    const std::string run = fmt::format(
        "cd {0} && env -u MODEL -u TRAIN SEEN={0}/seen PATH={0}:\"$PATH\" bash launch.sh deepspeed --more 'a b'",
        folder.path.string());
    REQUIRE(std::system(run.c_str()) == 0);
    std::string expected = name;
    for (char& ch : expected) ch = ch == '\n' ? ' ' : ch;
    const std::string seen = read_file(folder.path / "seen");
    CHECK_THAT(seen, HasText("--model_name_or_path\n" + expected + "\n"));
    CHECK_THAT(seen, HasText("--more\na b\n"));
    CHECK(!fs::exists(trap));
    check_yaml(find(files, "accelerate_fsdp.yaml")->text);
    CHECK(find(files, "accelerate_fsdp.yaml")->text.find('\xe2') == std::string::npos);
  }
}

TEST_CASE("launch.sh refuses an unknown engine and a missing script with exit 2") {
  TemporaryFolder folder;
  const std::vector<ExportFile> files = case_of("llama-2-7b", "4xA100-80G").files();
  write_file(folder.path / "launch.sh", find(files, "launch.sh")->text);
  const std::string go = fmt::format("cd '{}' && env -u TRAIN bash launch.sh ", folder.path.string());
  CHECK(WEXITSTATUS(std::system((go + "deepspeed 2>/dev/null").c_str())) == 2);
  write_file(folder.path / "train.py", "");
  CHECK(WEXITSTATUS(std::system((go + "megatron 2>/dev/null").c_str())) == 2);
}

TEST_CASE("launch.sh sets the allocator that memory was predicted with, and says where the user's differs") {
  TemporaryFolder folder;
  write_file(folder.path / "train.py", "");
  for (const char* program : {"torchrun", "accelerate"}) {
    write_file(folder.path / program,
               "#!/bin/sh\nprintf '%s\\n' \"conf=${PYTORCH_CUDA_ALLOC_CONF-none}\" \"$@\" > \"$SEEN\"\n");
    fs::permissions(folder.path / program, fs::perms::owner_all);
  }
  const auto run = [&](const Case& c, const std::string& environment, const std::string& engine) {
    write_file(folder.path / "launch.sh", find(c.files(), "launch.sh")->text);
    const std::string command = fmt::format(
        "cd '{0}' && env -u PYTORCH_ALLOC_CONF -u PYTORCH_CUDA_ALLOC_CONF -u TRAIN {1} SEEN='{0}/seen' "
        "PATH='{0}':\"$PATH\" "
        "bash launch.sh {2} 2> err",
        folder.path.string(), environment, engine);
    REQUIRE(std::system(command.c_str()) == 0);
    return read_file(folder.path / "seen") + "err: " + read_file(folder.path / "err");
  };
  Case c = case_of("llama-2-7b", "4xA100-80G");
  c.plan().engine = Engine::fsdp2;
  CHECK_THAT(run(c, "", "deepspeed"), HasText("conf=none\n"));
  CHECK_THAT(run(c, "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64", "deepspeed"),
             HasText("predicted with its defaults"));
  CHECK_THAT(run(c, "", "fsdp2"), HasText("--optim\nadamw_torch_fused\n"));
  c.plan().adam = AdamForm::foreach;
  CHECK_THAT(run(c, "", "fsdp2"), HasText("--optim\nadamw_torch\n"));
  c.plan().adam = AdamForm::loop;
  CHECK(run(c, "", "fsdp2").find("--optim") == std::string::npos);
  CHECK(any_has(c.notes(), "foreach=False"));
  c.plan().allocator_conf = "expandable_segments:True";
  for (const char* engine : {"deepspeed", "fsdp2"}) {
    CHECK_THAT(run(c, "", engine), HasText("conf=expandable_segments:True\n"));
    const std::string same = run(c, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", engine);
    CHECK(same.substr(same.find("err: ")) == "err: ");
    const std::string other = run(c, "PYTORCH_ALLOC_CONF=max_split_size_mb:64", engine);
    CHECK_THAT(other, HasText("is 'max_split_size_mb:64'; memory was predicted with expandable_segments:True"));
  }
}

TEST_CASE("Stage-3 knobs come from the model's layers and the plan's look-ahead") {
  Case c = case_of("llama-2-70b", "4xA100-80G");
  c.plan().prefetch_layers = 2;
  c.plan().recompute = Recompute::full, c.plan().recompute_layers = 80;
  const Json json = deepspeed_of(c.files());
  const Json& zero = json.at("zero_optimization");
  // A layer: 2 x 8192 norms, q and o 8192 x 8192, k and v 1024 x 8192, 3 x 8192 x 28672.
  const std::int64_t layer = 2 * 8192 + 2 * 8192LL * 8192 + 2 * 1024LL * 8192 + 3 * 8192LL * 28672;
  CHECK(zero["stage3_max_live_parameters"] == 3 * layer);
  CHECK(zero["stage3_max_reuse_distance"] == 2 * layer);
  CHECK(zero["stage3_prefetch_bucket_size"] == 100'000'000);
  CHECK(zero["stage3_param_persistence_threshold"] == 8192);
  CHECK(zero["stage3_model_persistence_threshold"] == 8192 * 161);
  CHECK(any_has(c.notes(), "gradient checkpointing"));
  c.plan().prefetch_layers = 0;
  CHECK(deepspeed_of(c.files())["zero_optimization"]["stage3_prefetch_bucket_size"] == 0);
}

TEST_CASE("States that are partly on the GPU go to the host, or by ratio where the host is full") {
  Case c = case_of("llama-2-7b", "4xA100-80G");
  const int blocks = c.plan().optimizer.total();
  c.plan().optimizer = {blocks / 2, blocks - blocks / 2, 0};
  set_host_memory(c.answer.request.machine, 1024_GiB);
  CHECK(!deepspeed_of(c.files())["zero_optimization"]["offload_optimizer"].contains("ratio"));
  CHECK(any_has(c.notes(), "all optimizer states are on the host"));
  set_host_memory(c.answer.request.machine, 100_GiB);
  const Json offload = deepspeed_of(c.files())["zero_optimization"]["offload_optimizer"];
  // Half of 12 bytes a parameter holds 3/8 of DeepSpeed's 16.
  CHECK_THAT(offload["ratio"].get<double>(), tests::WithinAbs(0.63, 0.011));
}

TEST_CASE("A plan with NVMe below stage 3 is exported at stage 3") {
  Case c = case_of("llama-2-7b", "4xA100-80G");
  c.plan().zero_stage = 2;
  c.plan().optimizer = Placement::all(Tier::nvme, c.plan().optimizer.total());
  set_nvme(c.answer.request.machine, "2x2TB");
  const std::vector<ExportFile> files = c.files();
  const Json json = deepspeed_of(files);
  CHECK(json["zero_optimization"]["stage"] == 3);
  CHECK(json.contains("aio"));
  CHECK(any_has(c.notes(), "stage 3 instead of 2"));
  CHECK_THAT(find(files, "launch.sh")->text, HasText("/local_nvme"));
}

TEST_CASE("An optimizer that DeepSpeed cannot hold in host memory goes to the node's NVMe if that can") {
  Case c = case_of("llama-2-7b", "4xA100-80G");
  c.plan().optimizer = Placement::all(Tier::host, c.plan().optimizer.total());
  // 12 bytes a parameter are 75.3 GiB; DeepSpeed's 18 are 113 and its processes 8.
  set_host_memory(c.answer.request.machine, 110_GiB);
  set_nvme(c.answer.request.machine, "1x100GB");
  CHECK(deepspeed_of(c.files())["zero_optimization"]["offload_optimizer"]["device"] == "cpu");
  CHECK(any_has(c.notes(), "does not fit"));
  set_nvme(c.answer.request.machine, "1x2TB");
  CHECK(deepspeed_of(c.files())["zero_optimization"]["offload_optimizer"]["device"] == "nvme");
  CHECK(any_has(c.notes(), "optimizer states on NVMe"));
  CHECK(!any_has(c.notes(), "does not fit"));
}

TEST_CASE("accelerate_fsdp.yaml is written for what FSDP2 can do and for nothing else") {
  Case c = case_of("llama-2-7b", "8xA100-80G", 2);
  const int blocks = c.plan().optimizer.total();
  const auto yaml = [&c] {
    const std::vector<ExportFile> files = c.files();
    const ExportFile* file = find(files, "accelerate_fsdp.yaml");
    return file ? file->text : std::string();
  };
  CHECK_THAT(yaml(), HasText("fsdp_reshard_after_forward: true"));
  CHECK_THAT(yaml(), HasText("num_machines: 2\nnum_processes: 16\n"));
  c.plan().shard_ranks = 8;
  CHECK_THAT(yaml(), HasText("dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 8\n"));
  c.plan().shard_ranks = 16;
  c.plan().zero_stage = 2;
  CHECK_THAT(yaml(), HasText("fsdp_reshard_after_forward: false"));
  c.plan().optimizer = Placement::all(Tier::host, blocks);
  CHECK(yaml().empty());
  c.plan().zero_stage = 3, c.plan().parameters = Placement::all(Tier::host, blocks);
  CHECK_THAT(yaml(), HasText("fsdp_offload_params: true"));
  c.plan().parameters = Placement::all(Tier::nvme, blocks);
  CHECK(yaml().empty());
  c.plan().zero_stage = 1, c.plan().parameters = c.plan().optimizer = Placement::all(Tier::hbm, blocks);
  CHECK(yaml().empty());
}

TEST_CASE("Host memory under DeepSpeed is 18 bytes a parameter, 20 with weights") {
  // deepspeed.md 6 and 12, measured: stage 3 with offloaded optimizer 4 + 4 + 2 + 8 bytes an owned element.
  Case c = case_of("llama-2-7b", "4xA100-80G");
  const int blocks = c.plan().optimizer.total();
  c.plan().optimizer = Placement::all(Tier::host, blocks);
  std::vector<std::string> notes;
  const ExportSubject subject{c.candidate.plan, c.answer.request.model, c.answer.request.machine,
                              c.candidate.prediction, 0.05};
  const auto per_parameter = [&] {
    const HostNeed need = deepspeed_host_need(subject, choose_deepspeed(subject, notes));
    CHECK(need.rounded >= need.exact);
    return (need.exact - Bytes(4 * 2 * kGiB)).base() / static_cast<double>(subject.model.parameters());
  };
  CHECK_THAT(per_parameter(), tests::WithinRel(18.0, 1e-6));
  c.plan().parameters = Placement::all(Tier::host, blocks);
  CHECK_THAT(per_parameter(), tests::WithinRel(20.0, 1e-6));
}
