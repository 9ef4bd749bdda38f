#include "models/eager_step.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>

#include <fmt/format.h>

#include "models/eager_decoder.h"
#include "models/eager_gpt.h"
#include "models/error.h"
#include "models/families.h"

namespace zeroplan {
namespace {

eager::Element element_of(DType type) {
  switch (type) {
    case DType::bf16:
      return eager::Element::bf16;
    case DType::fp16:
      return eager::Element::fp16;
    case DType::fp32:
      return eager::Element::fp32;
    default:
      throw InputError(fmt::format("type of an eager step: expected bf16, fp16 or fp32, got {}", to_string(type)));
  }
}

/// The language model's part of a configuration, as the model's reader takes it.
const JsonValue& language_part(const JsonValue& root, const std::string& family) {
  const JsonValue* type = root.find("model_type");
  if (type != nullptr && type->is_string() && type->as_string() == family) return root;
  const JsonValue* text = root.find("text_config");
  return text != nullptr ? *text : root;
}

bool has_experts(const ModelSpec& model) {
  return std::ranges::any_of(model.kinds, [](const BlockKind& kind) {
    return std::ranges::any_of(kind.tensors, [](const TensorSpec& tensor) {
      return tensor.kind == TensorKind::router || tensor.kind == TensorKind::expert;
    });
  });
}

/// peft wraps routers and stacked experts by other means than a linear layer's adapter, and bert and t5 are no causal
/// language models to it: their adapted steps were not recorded.
void check_adapters(const ModelSpec& model, const EagerOptions& options) {
  if (options.lora_rank < 0) {
    throw InputError(fmt::format("eager step: lora_rank: expected 0 or more, got {}", options.lora_rank));
  }
  if (options.lora_rank == 0) return;
  if (has_experts(model) || model.family == "bert" || model.family == "t5") {
    throw InputError(fmt::format("eager step: {}: LoRA is known for dense causal language models only (family {})",
                                 model.name, model.family));
  }
}

void check_checkpointing(const EagerOptions& options) {
  if (options.checkpoint_every < 1) {
    throw InputError(fmt::format("eager step: checkpoint_every: expected 1 or more, got {}", options.checkpoint_every));
  }
  const bool plain = options.checkpointing && !options.reentrant;
  if ((options.keeps_operators || options.offloads_checkpoints) && !plain) {
    throw InputError("eager step: keeps_operators and offloads_checkpoints need checkpointing that is not reentrant");
  }
}

void check_options(const ModelSpec& model, const EagerOptions& options) {
  check_adapters(model, options);
  check_checkpointing(options);
  const bool transformers = options.code == EagerCode::transformers;
  if (transformers && options.attention == EagerAttention::sdpa && usual_attention(model) != EagerAttention::sdpa) {
    throw InputError(fmt::format("eager step: transformers has no SDPA attention for {} ({}): ask for eager attention",
                                 model.family, model.name));
  }
  if (options.tokens.batch < 1 || options.tokens.seq_len < 1) {
    throw InputError("eager step: expected a micro-batch and a sequence of at least 1");
  }
  if (model.max_positions > 0 && options.tokens.seq_len > model.max_positions && model.family == "gpt2") {
    throw InputError(fmt::format("eager step: {} has {} positions, got a sequence of {}", model.name,
                                 model.max_positions, options.tokens.seq_len));
  }
}

std::unique_ptr<eager::EagerModel> make_model(eager::Context& context) {
  const std::string& family = context.model.family;
  switch (context.options.code) {
    case EagerCode::transformers:
      break;
    case EagerCode::llm_foundry:
    case EagerCode::llm_foundry_early:
      return make_llm_foundry(context);
    case EagerCode::megatron:
      if (family != "gpt2") throw InputError("eager step: Megatron's GPT is known with the shape of gpt2 only");
      break;
  }
  if (const eager::DecoderStyle* style = eager::find_decoder_style(family)) return make_decoder(context, *style);
  if (family == "gpt2") return make_gpt2(context);
  if (family == "gpt_neox") return make_gpt_neox(context);
  if (family == "opt") return make_opt(context);
  if (family == "t5") return make_t5(context);
  if (family == "falcon") return make_falcon(context);
  if (family == "bloom") return make_bloom(context);
  if (family == "bert") return make_bert(context);
  if (family == "gptj") return make_gptj(context);
  if (family == "mpt") return make_mpt(context);
  throw InputError(fmt::format("eager step: no eager graph is known for family {} ({})", family, context.model.name));
}

}  // namespace

EagerAttention usual_attention(const ModelSpec& model) {
  constexpr std::array<std::string_view, 4> kWithoutSdpa = {"bloom", "gpt_oss", "gptj", "mpt"};
  const bool none = std::ranges::find(kWithoutSdpa, model.family) != kWithoutSdpa.end();
  return none ? EagerAttention::eager : EagerAttention::sdpa;
}

bool eager_softmax_is_fp32(const ModelSpec& model) {
  constexpr std::string_view kNarrow[] = {"gpt2", "bert", "falcon", "t5"};
  return std::find(std::begin(kNarrow), std::end(kNarrow), model.family) == std::end(kNarrow);
}

EagerStep eager_step(const ModelSpec& model, const EagerOptions& options) {
  check_options(model, options);
  const JsonDocument document = JsonDocument::parse(model.config, model.name, JsonSyntax::comments);
  const Family* family = find_family(model.family);
  if (family == nullptr) throw InputError(fmt::format("eager step: unknown family {}", model.family));
  ConfigReader reader(language_part(document.root(), model.family), model.family, &document.root());
  const Architecture sizes = read_architecture(*family, reader);
  EagerStep step;
  {
    eager::Tape tape(step);
    eager::Context context{model, sizes, reader, options, step, tape, element_of(options.type), "", -1, 0};
    if (options.keeps_operators) tape.keep_operators();
    if (options.offloads_checkpoints) tape.offload_checkpoints();
    if (options.zero3) tape.run_under_zero3();
    if (options.cpu_statistics) tape.keep_statistics_narrow();
    const bool adapts = options.lora_rank > 0;
    if (adapts) {  // peft's two wrappers
      context.module("", "PeftModelForCausalLM");
      context.module("base_model", "LoraModel");
      context.prefix = "base_model.model";
    }
    const std::unique_ptr<eager::EagerModel> root = make_model(context);
    const eager::Dims shape = {options.tokens.batch, options.tokens.seq_len};
    eager::Tensor logits;
    eager::Tensor loss;
    {
      const eager::Tensor ids = tape.external(shape, eager::Element::i64);
      for (int wrapper = 0; adapts && wrapper < 2; ++wrapper) tape.forward_pre(wrapper);
      loss = root->forward(ids, ids, logits);
      for (int wrapper = 1; adapts && wrapper >= 0; --wrapper) tape.forward_post(wrapper, {&loss, &logits});
    }
    if (!options.keeps_output) logits.drop();
    tape.forward_end();
    tape.backward(loss);
    loss.drop();
    step.events.push_back({EagerEventKind::backward_end, 0, -1, 0});
    logits.drop();  // the caller's, who has not come back yet when an engine ends its backward
  }
  return step;
}

EagerPeaks eager_peaks(const EagerStep& step) {
  constexpr std::int64_t kBlock = 512;
  std::unordered_map<std::int32_t, std::int64_t> sizes;
  std::int64_t now = 0, peak = 0;
  EagerPeaks peaks;
  const auto release = [&](std::int32_t id) {
    const auto found = sizes.find(id);
    if (found == sizes.end()) return;
    now -= found->second;
    sizes.erase(found);
  };
  for (const EagerEvent& event : step.events) {
    switch (event.kind) {
      case EagerEventKind::alloc: {
        const std::int64_t bytes = (event.bytes + kBlock - 1) / kBlock * kBlock;
        sizes.emplace(event.id, bytes);
        now += bytes;
        peak = std::max(peak, now);
        break;
      }
      case EagerEventKind::free:
        release(event.id);
        break;
      case EagerEventKind::gradient:
        release(event.storage);
        break;
      case EagerEventKind::forward_end:
        peaks.forward = Bytes(static_cast<double>(peak));
        peaks.saved = Bytes(static_cast<double>(now));
        peak = now;
        break;
      case EagerEventKind::backward_end:
        peaks.backward = Bytes(static_cast<double>(peak));
        break;
      case EagerEventKind::kernel:
      case EagerEventKind::forward_pre:
      case EagerEventKind::forward_post:
      case EagerEventKind::backward_pre:
      case EagerEventKind::backward_post:
      case EagerEventKind::hold:
      case EagerEventKind::let_go:
        break;
    }
  }
  return peaks;
}

}  // namespace zeroplan
