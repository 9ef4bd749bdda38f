#include "cli/values.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "models/error.h"

namespace zeroplan {
namespace {

[[noreturn]] void refuse(std::string_view flag, std::string_view expected, std::string_view text) {
  constexpr std::size_t kLongest = 60;
  throw InputError(fmt::format("{}: expected {}, got \"{}\"{}", flag, expected, text.substr(0, kLongest),
                               text.size() > kLongest ? "..." : ""));
}

template <class E>
struct Choice {
  std::string_view name;
  E value;
};

template <class E, std::size_t N>
E choose(const std::array<Choice<E>, N>& choices, std::string_view text, std::string_view flag) {
  std::vector<std::string> names;
  for (const Choice<E>& choice : choices) {
    if (choice.name == text) return choice.value;
    names.emplace_back(choice.name);
  }
  refuse(flag, fmt::format("one of {}", fmt::join(names, ", ")), text);
}

/// Digits with at most one point and an exponent at the front of the text; `rest` is what follows. No signs, no nan.
std::optional<double> leading_number(std::string_view text, std::string_view& rest) {
  if (text.empty() || text[0] < '0' || text[0] > '9') return std::nullopt;
  double value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc{} || !std::isfinite(value)) return std::nullopt;
  rest = text.substr(static_cast<std::size_t>(parsed.ptr - text.data()));
  return value;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

}  // namespace

DType parse_precision(std::string_view text, std::string_view flag) {
  constexpr std::array kChoices{Choice{"bf16", DType::bf16}, Choice{"fp16", DType::fp16}, Choice{"fp32", DType::fp32}};
  return choose(kChoices, text, flag);
}

AdamForm parse_adam_form(std::string_view text, std::string_view flag) {
  constexpr std::array kChoices{Choice{"fused", AdamForm::fused}, Choice{"foreach", AdamForm::foreach},
                                Choice{"loop", AdamForm::loop}};
  return choose(kChoices, text, flag);
}

Recompute parse_recompute(std::string_view text, std::string_view flag) {
  constexpr std::array kChoices{Choice{"none", Recompute::none}, Choice{"selective", Recompute::selective},
                                Choice{"full", Recompute::full}};
  return choose(kChoices, text, flag);
}

Engine parse_engine(std::string_view text, std::string_view flag) {
  constexpr std::array kChoices{Choice{"zeroplan", Engine::zeroplan}, Choice{"deepspeed", Engine::deepspeed},
                                Choice{"fsdp2", Engine::fsdp2}};
  return choose(kChoices, text, flag);
}

Objective parse_objective(std::string_view text, std::string_view flag) {
  constexpr std::array kChoices{Choice{"time", Objective::time}, Choice{"cost", Objective::cost},
                                Choice{"memory", Objective::memory}};
  return choose(kChoices, text, flag);
}

Offload parse_offload(std::string_view text, std::string_view flag) {
  constexpr std::array kWhats{
      Choice{"none", OffloadWhat::none},
      Choice{"optimizer", OffloadWhat::optimizer},
      Choice{"parameters", OffloadWhat::parameters},
      Choice{"all", OffloadWhat::all},
  };
  constexpr std::array kTiers{Choice{"cpu", Tier::host}, Choice{"nvme", Tier::nvme}};
  const std::size_t colon = text.find(':');
  Offload offload;
  offload.what = choose(kWhats, text.substr(0, colon), flag);
  if (colon == std::string_view::npos) return offload;
  if (offload.what == OffloadWhat::none) refuse(flag, "\"none\" without a tier", text);
  offload.to = choose(kTiers, text.substr(colon + 1), fmt::format("{} {}", flag, text.substr(0, colon)));
  return offload;
}

std::vector<int> parse_stages(std::string_view text, std::string_view flag) {
  std::vector<int> stages;
  for (const std::string_view part : split(text, ',')) {
    if (part.size() != 1 || part[0] < '0' || part[0] > '3') {
      refuse(flag, "a stage from 0 to 3, or several such as 0,1,2,3", text);
    }
    const int stage = part[0] - '0';
    if (std::ranges::find(stages, stage) != stages.end()) refuse(flag, "each stage once", text);
    stages.push_back(stage);
  }
  return stages;
}

double parse_margin(std::string_view text, std::string_view flag) {
  constexpr double kLargest = 90;
  std::string_view rest;
  const std::optional<double> percent = leading_number(text, rest);
  if (!percent || rest != "%" || *percent > kLargest) refuse(flag, "a part such as 5%, from 0% to 90%", text);
  return *percent / 100;
}

double parse_tokens(std::string_view text, std::string_view flag) {
  constexpr std::string_view kExpected = "a number of tokens such as 300B, 1.5T, 2e12 or 100000000, from 1 to 1e18";
  constexpr double kLargest = 1e18;
  std::string_view rest;
  const std::optional<double> number = leading_number(text, rest);
  if (!number || rest.size() > 1) refuse(flag, kExpected, text);
  double scale = 1;
  if (!rest.empty()) {
    switch (rest[0]) {
      case 'K':
      case 'k':
        scale = 1e3;
        break;
      case 'M':
        scale = 1e6;
        break;
      case 'B':
      case 'G':
        scale = 1e9;
        break;
      case 'T':
        scale = 1e12;
        break;
      default:
        refuse(flag, kExpected, text);
    }
  }
  const double tokens = *number * scale;
  if (tokens < 1 || tokens > kLargest) refuse(flag, kExpected, text);
  return tokens;
}

std::int64_t parse_trainable(std::string_view text, std::string_view flag) {
  constexpr std::string_view kLora = "lora:r=";
  if (text == "all") return 0;
  if (!text.starts_with(kLora)) refuse(flag, "\"all\" or \"lora:r=16\"", text);
  constexpr std::int64_t kLargestRank = 65536;
  return parse_integer(text.substr(kLora.size()), fmt::format("{} lora: r", flag), 1, kLargestRank);
}

double parse_usd(std::string_view text, std::string_view flag) {
  constexpr double kLargest = 1e6;
  std::string_view rest;
  const std::optional<double> usd = leading_number(text, rest);
  if (!usd || rest != "USD" || !(*usd > 0) || *usd > kLargest) {
    refuse(flag, "US dollars an hour and node such as 31.5USD", text);
  }
  return *usd;
}

}  // namespace zeroplan
