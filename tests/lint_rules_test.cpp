// Every rule of check: the wrong key or the contradiction that it is for.

#include <nlohmann/json.hpp>
#include <set>

#include "models/error.h"
#include "planner/lint_parts.h"
#include "planner/lint_report.h"
#include "tests/catch.h"
#include "tests/lint_support.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

using Json = nlohmann::ordered_json;

}  // namespace

TEST_CASE("Every wrong key of the reference is caught with its consequence") {
  struct Case {
    const char* key;  // as the reference names it
    std::string text;
    const char* rule;
    std::vector<const char*> says;
  };
  const auto batch = [](std::string_view members) {
    return fmt::format(R"({{"bf16": {{"enabled": true}}, {}}})", members);
  };
  const std::string offload = R"("stage": 3, "offload_optimizer": {"device": "cpu", )";
  const std::string param = R"("stage": 3, "offload_param": {"device": "cpu", )";
  const Case cases[] = {
      {"zero_optimization.stage3_sub_group_size",
       zero(R"("stage": 3, "stage3_sub_group_size": 1e9)"),
       "stage3-prefix",
       {"ValidationError"}},
      {"zero_optimization.stage3_reduce_bucket_size",
       zero(R"("stage": 3, "stage3_reduce_bucket_size": 1e8)"),
       "stage3-prefix",
       {"ValidationError"}},
      {"zero_optimization.cpu_offload_params (plural)",
       zero(R"("stage": 3, "cpu_offload_params": true)"),
       "misspelt-key-refused",
       {"ValidationError", "offload_param"}},
      {"zero_optimization.grad_hooks",
       zero(R"("stage": 3, "grad_hooks": true)"),
       "retired-key-refused",
       {"ValidationError", "documentation"}},
      {"zero_optimization.aio",
       zero(R"("stage": 3, "aio": {"block_size": 1048576})"),
       "misplaced-key-refused",
       {"ValidationError", "the top level"}},
      {"zero_optimization.zero3_init_flag",
       zero(R"("stage": 3, "zero3_init_flag": true)"),
       "accelerate-key-refused",
       {"ValidationError", "accelerate"}},
      {"zero_optimization.offload_optimizer.offload_param",
       zero(offload + R"("offload_param": {"device": "cpu"}})"),
       "offload-nested",
       {"ValidationError", "siblings"}},
      {"zero_optimization.offload_optimizer.buffer_size / max_in_cpu",
       zero(offload + R"("buffer_size": 1e8})"),
       "misplaced-key-refused",
       {"ValidationError", "offload_param"}},
      {"zero_optimization.offload_optimizer.buffer_size / max_in_cpu",
       zero(offload + R"("max_in_cpu": 1e9})"),
       "misplaced-key-refused",
       {"ValidationError", "offload_param"}},
      {"zero_optimization.offload_optimizer.pipeline",
       zero(offload + R"("pipeline": true})"),
       "retired-key-refused",
       {"ValidationError", "pipeline_read"}},
      {"zero_optimization.offload_param.pipeline_read",
       zero(param + R"("pipeline_read": true})"),
       "misplaced-key-refused",
       {"ValidationError", "offload_optimizer"}},
      {"offload_optimizer / offload_param at top level",
       with(R"("offload_optimizer": {"device": "cpu"})"),
       "misplaced-key-ignored",
       {"ignores it silently", "no offload happens"}},
      {"offload_optimizer / offload_param at top level",
       with(R"("offload_param": {"device": "cpu"})"),
       "misplaced-key-ignored",
       {"ignores it silently", "no offload happens"}},
      {"communication_data_exchange (top level)",
       with(R"("communication_data_exchange": "fp16")"),
       "misspelt-key-ignored",
       {"ignores it silently"}},
      {"grad_accum_dtype (top level)",
       with(R"("grad_accum_dtype": "fp32")"),
       "misplaced-key-ignored",
       {"ignores it silently", "data_types"}},
      {"data_types.foo", with(R"("data_types": {"foo": 1})"), "unknown-key-ignored", {"ignores it silently"}},
      {"aio.thread_count", with(R"("aio": {"thread_count": 1})"), "renamed-key", {"ignores it silently"}},
      {"round_robin_gradients at stage 3",
       zero(R"("stage": 3, "round_robin_gradients": true)"),
       "round-robin-stage-3",
       {"no effect"}},
      {"offload_param at stage 2",
       zero(R"("stage": 2, "offload_param": {"device": "cpu"})"),
       "offload-param-below-3",
       {"accepted", "no effect"}},
      {"offload_optimizer.device=nvme at stage 2",
       zero(R"("stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"})"),
       "nvme-below-3",
       {"behaves as cpu"}},
      {"allgather_bucket_size at stage 3, or stage3_* at stages 1-2",
       zero(R"("stage": 3, "allgather_bucket_size": 2e8)"),
       "unread-key-default",
       {"no effect"}},
      {"allgather_bucket_size at stage 3, or stage3_* at stages 1-2",
       zero(R"("stage": 2, "stage3_max_live_parameters": 1e8)"),
       "stage3-key-below-3",
       {"accepted", "no effect"}},
      {"allgather_partitions=false",
       zero(R"("stage": 2, "allgather_partitions": false)"),
       "unread-key",
       {"accepted", "no effect"}},
      {"bf16.loss_scale, bf16.check_overflow, fp16.opt_level",
       batch(R"("train_batch_size": 8, "bf16": {"enabled": true, "loss_scale": 0})"),
       "duplicate-key",
       {"ValueError"}},
      {"bf16.loss_scale, bf16.check_overflow, fp16.opt_level",
       R"({"train_batch_size": 8, "bf16": {"enabled": true, "loss_scale": 0}})",
       "retired-key-refused",
       {"ValidationError"}},
      {"bf16.loss_scale, bf16.check_overflow, fp16.opt_level",
       R"({"train_batch_size": 8, "bf16": {"enabled": true, "check_overflow": true}})",
       "misspelt-key-refused",
       {"ValidationError"}},
      {"bf16.loss_scale, bf16.check_overflow, fp16.opt_level",
       with(R"("fp16": {"enabled": false, "opt_level": "O2"})"),
       "retired-key-refused",
       {"ValidationError"}},
      {"bf16: true", R"({"train_batch_size": 8, "bf16": true})", "section-not-object", {"TypeError"}},
      {"both bf16 and bfloat16", with(R"("bfloat16": {"enabled": false})"), "bfloat16-and-bf16", {"ignored"}},
      {"zero_optimization: \"auto\" or null",
       with(R"("zero_optimization": "auto")"),
       "section-not-object",
       {"TypeError"}},
      {"zero_optimization: \"auto\" or null",
       with(R"("zero_optimization": null)"),
       "section-not-object",
       {"TypeError"}},
      {"stage: \"auto\"", zero(R"("stage": "auto")"), "auto-stage", {"silently", "stage 0"}},
      {"reduce_bucket_size: \"5e8\" (string)",
       zero(R"("stage": 2, "reduce_bucket_size": "5e8")"),
       "number-as-text",
       {"ValidationError"}},
      {"sub_group_size written as 1e9 float", zero(R"("stage": 3, "sub_group_size": 1e9)"), "", {}},
      {"train_batch_size / micro / gas = \"auto\" outside HF",
       batch(R"("train_batch_size": "auto")"),
       "auto-needs-trainer",
       {"train_batch_size", "TypeError"}},
      {"train_batch_size / micro / gas = \"auto\" outside HF",
       batch(R"("train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto")"),
       "auto-needs-trainer",
       {"gradient_accumulation_steps", "TypeError"}},
      {"gradient_clipping = \"auto\" outside HF",
       with(R"("gradient_clipping": "auto")"),
       "auto-needs-trainer",
       {"gradient_clipping fails in the first step"}},
      {"stage3_max_live_parameters / stage3_max_reuse_distance = \"auto\"",
       zero(R"("stage": 3, "stage3_max_live_parameters": "auto")"),
       "auto-dropped",
       {"drops it and takes 1000000000"}},
      {"stage3_max_live_parameters / stage3_max_reuse_distance = \"auto\"",
       zero(R"("stage": 3, "stage3_max_reuse_distance": "auto")"),
       "auto-dropped",
       {"drops it and takes 1000000000"}},
      {"offload_optimizer.device=\"gpu\"",
       zero(R"("stage": 2, "offload_optimizer": {"device": "gpu"})"),
       "bad-choice",
       {"ValidationError"}},
      {"offload_optimizer: true",
       zero(R"("stage": 2, "offload_optimizer": true)"),
       "section-not-object",
       {"ValidationError"}},
      {"prefetch_bucket_size and stage3_prefetch_bucket_size together",
       zero(R"("stage": 3, "prefetch_bucket_size": 1e7, "stage3_prefetch_bucket_size": 1e7)"),
       "alias-pair",
       {"ValidationError"}},
      {"cpu_offload with offload_optimizer",
       zero(R"("stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "cpu"})"),
       "deprecated-with-new",
       {"AssertionError"}},
      {"optimizer.params.max_grad_norm",
       with(R"("optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}})"),
       "max-grad-norm",
       {"ValueError at engine start"}},
      {"zero_quantized_weight (singular)",
       zero(R"("stage": 3, "zero_quantized_weight": true)"),
       "misspelt-key-refused",
       {"ValidationError", "zero_quantized_weights"}},
  };
  std::set<std::string> open;
  const Json reference = Json::parse(read_file(kData / "wrong_keys.json"));
  for (const Json& entry : reference.at("wrong_keys")) open.insert(entry.at("key").get<std::string>());
  for (const Case& c : cases) {
    INFO(c.key);
    const Checked checked(c.text);
    INFO(checked.listing());
    open.erase(c.key);
    if (*c.rule == '\0') {
      CHECK_FALSE(checked.answer.has_errors());
      continue;
    }
    const Finding* finding = checked.find(c.rule);
    REQUIRE(finding != nullptr);
    for (const char* part : c.says) CHECK_THAT(finding->message, HasText(part));
  }
  INFO("wrong keys of the reference without a case");
  CHECK(open == std::set<std::string>());
}

TEST_CASE("Contradictions that DeepSpeed checks are found before it does") {
  struct Case {
    std::string text;
    const char* rule;
    int nodes = 1;
  };
  const auto optimizer = [](std::string_view type, std::string_view members) {
    return with(fmt::format(R"("optimizer": {{"type": "{}", "params": {{"lr": 1e-4}}}}, "zero_optimization": {{{}}})",
                            type, members));
  };
  const std::string half = R"({"train_batch_size": 8, "fp16": {"enabled": true)";
  const Case cases[] = {
      {with(R"("fp16": {"enabled": true})"), "fp16-and-bf16"},
      {half + R"(, "fp16_master_weights_and_grads": true}})", "master-stage-0"},
      {half + R"(, "fp16_master_weights_and_grads": true}, "zero_optimization": {"stage": 2}})",
       "master-needs-offload"},
      {R"({"train_batch_size": 8, "bf16": {"enabled": true, "bf16_optimizer_states": true}, "zero_optimization": {"stage": 2}})",
       "states-need-master"},
      {half + R"(, "loss_scale": 128, "loss_scale_window": 100}})", "static-loss-scale"},
      {half + R"(, "loss_scale": -1}})", "out-of-range"},
      {half + R"(, "loss_scale": true}})", "wrong-type"},
      {zero(R"("stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5})"), "ratio-below-3"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5})"), "ratio-sub-groups"},
      {with(R"("gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3})"), "allreduce-sum"},
      {with(R"("communication_data_type": "int8")"), "bad-choice"},
      {with(R"("checkpoint": {"tag_validation": "maybe"})"), "bad-choice"},
      {with(R"("data_types": {"param_dtype": "fp16"})"), "param-dtype"},
      {with(R"("data_types": {"grad_accum_dtype": "fp32"})"), "grad-accum-stage-0"},
      {with(R"("data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1})"), "grad-accum-stage-1"},
      {with(R"("data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 3})"), "grad-accum-stage-3"},
      {with(
           R"("data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}})"),
       "nvme-dropped"},
      {with(R"("amp": {"enabled": true}, "zero_optimization": {"stage": 1})"), "amp-with-zero"},
      {with(R"("amp": {"opt_level": "O1"})"), "amp-without-enabled"},
      {optimizer("SGD", R"("stage": 2)"), "optimizer-untested"},
      {optimizer("sgd", R"("stage": 0)"), "optimizer-case"},
      {optimizer("AdamWW", R"("stage": 0)"), "optimizer-unknown"},
      {optimizer("OneBitAdam", R"("stage": 1)"), "optimizer-onebit-zero"},
      {optimizer("Muon", R"("stage": 3)"), "muon-stage-3"},
      {optimizer("Muon", R"("stage": 2, "offload_optimizer": {"device": "cpu"})"), "muon-offload"},
      {zero(R"("stage": 2, "legacy_stage1": true)"), "legacy-stage1"},
      {with(R"("prescale_gradients": true, "zero_optimization": {"stage": 2})"), "prescale-reduce-scatter"},
      {with(R"("gradient_predivide_factor": 2.0, "zero_optimization": {"stage": 3})"), "prescale-reduce-scatter"},
      {zero(R"("stage": 2, "allgather_bucket_size": 499999999)"), "allgather-bucket-odd"},
      {zero(R"("stage": 2, "zenflow": {"topk_ratio": 0.1})"), "zenflow-offload"},
      {zero(R"("stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"offload": true})"), "zenflow-overlap"},
      {with(
           R"("torch_autocast": {"enabled": true}, "zero_optimization": {"stage": 3, "zero_quantized_weights": true})"),
       "autocast-with-qwz"},
      {zero(R"("stage": 3, "zero_hpz_partition_size": 3)"), "hpz-divides"},
      {zero(R"("stage": 3, "zero_hpz_partition_size": 64)"), "hpz-above-ranks"},
      {zero(R"("stage": 3, "zero_hpz_partition_size": 4)"), "hpz-one-node"},
      {zero(R"("stage": 3, "zero_hpz_partition_size": 16)"), "hpz-across-nodes", 4},
      {zero(R"("stage": 3, "zero_quantized_gradients": true)"), "qgz-one-node"},
      {zero(R"("stage": 3, "zero_quantized_gradients": true)"), "qgz-bf16", 2},
      {zero(R"("stage": 3, "zeropp_loco_param": {"err_beta": 0.8})"), "loco-dead"},
      {zero(R"("stage": 3, "zero_quantized_gradients": true, "zeropp_loco_param": {"err_beta": 0.8})"), "loco-keys"},
      {zero(R"("stage": 3, "mics_shard_size": 3)"), "mics-divides"},
      {zero(R"("stage": 3, "mics_shard_size": 4, "offload_optimizer": {"device": "cpu"})"), "mics-offload"},
      {zero(R"("stage": 3, "mics_shard_size": 4)"), "mics-removed"},
      {zero(R"("stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": true)"), "mics-hierarchical-node",
       2},
      {zero(R"("stage": 3, "mics_shard_size": 4, "offload_param": {"device": "cpu"})"), "mics-offload-param"},
      {zero(R"("stage": 3, "mics_shard_size": 4, "zero_quantized_weights": true)"), "mics-dead"},
      {zero(R"("stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 2)"), "mics-dead"},
      {with(R"("elasticity": {"enabled": false})"), "removed-later"},
      {zero(R"("stage": 3, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024})"), "removed-later"},
      {zero(R"("stage": 2, "zero_hpz_partition_size": 8)"), "stage3-key-below-3"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme"})"), "nvme-path-missing"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "scratch"})"), "nvme-path-relative"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/dev/shm/x"})"), "nvme-path-memory"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d", "buffer_count": 2})"),
       "swap-buffers-few"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d", "pipeline_read": true})"),
       "swap-buffers-pipeline"},
      {zero(R"("stage": 2, "offload_optimizer": {"pin_memory": true})"), "offload-without-device"},
      {zero(R"("overlap_comm": true)"), "stage-missing"},
      {zero(R"("stage": 4)"), "out-of-range"},
      {zero(R"("stage": 3, "stage3_prefetch_bucket_size": 15099494.4)"), "fractional-integer"},
      {zero(R"("stage": 3, "sub_group_size": -1)"), "out-of-range"},
      {zero(R"("stage": 2, "reduce_bucket_size": null)"), "null-value"},
      {zero(R"("stage": 3, "prefetch_bucket_size": "auto")"), "auto-alias"},
      {R"({"train_batch_size": "8"})", "number-as-text"},
      {with(R"("steps_per_print": "auto")"), "auto-literal"},
      {with(R"("wall_clock_breakdown": "false")"), "bool-as-text"},
      {with(R"("elasticity": {"enabled": true})"), "batch-elasticity"},
      {with(R"("zero_optimization.stage": 2)"), "dotted-key"},
      {with(R"("Zero_Optimization": {"stage": 2})"), "wrong-case-key"},
      {with(R"("gradient_clipp1ng": 1.0)"), "misspelt-key-ignored"},
      {zero(R"("stage": 3, "stage3_param_persitence_threshold": 1e5)"), "misspelt-key-refused"},
      {with(R"("activation_checkpointing": {"contiguous_memory_optimization": true})"), "contiguous-checkpoints"},
      {with(R"("optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-4}})"), "optimizer-param-unknown"},
      {with(R"("optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}})"), "number-as-text"},
      {with(R"("optimizer": {"type": "AdamW", "params": {"betas": [0.9]}})"), "betas-shape"},
      {with(R"("optimizer": {"params": {"lr": 1e-4}})"), "optimizer-without-type"},
      {with(R"("scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}})"),
       "scheduler-param-missing"},
      {with(R"("scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}})"), "scheduler-param-unknown"},
      {with(R"("scheduler": {"type": "cosine"})"), "scheduler-unknown"},
      {with(R"("sparse_attention": {"mode": "odd"})"), "sparse-attention-mode"},
      {with(R"("scheduler": {"type": "WarmupLR", "params": {"warmup_type": "Linear"}})"), "scheduler-warmup-type"},
      {zero(R"("stage": 3, "zero_quantized_gradients": true, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024})"),
       "loco-memory"},
      {zero(R"("stage": 3)"), "default-bucket"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"})"), "swap-buffers-locked"},
      {zero(
           R"("stage": 3, "sub_group_size": 1e9, "offload_param": {"device": "nvme", "nvme_path": "/d"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/d", "fast_init": true})"),
       "fast-init-buffer"},
      {with(
           R"("aio": {"block_size": 1073741824}, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/d"}})"),
       "aio-block-large"},
      {"[1, 2]", "top-level-shape"},
      {R"({"gradient_accumulation_steps": 2})", "batch-missing"},
      {R"({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2})", "batch-identity"},
  };
  for (const Case& c : cases) {
    INFO(c.rule << "\n" << c.text);
    const Checked checked(c.text, "7B", "8xA100-80G", c.nodes);
    INFO(checked.listing());
    CHECK(checked.has(c.rule));
  }
}
