// Built on demand (ninja eager_table): eager steps against recorded ones.
//   eager_table rows FILE.jsonl [FILTER]          errors of each row of data/activations, in per cent
//   eager_table events CONFIG MB SEQ AC [attn=eager] [lora=R] [reent] [keep] [dtype=fp32]
//                                                 ordered events, one a line, as record.py prints them

#include <chrono>
#include <fstream>
#include <iostream>
#include <map>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "models/eager_step.h"
#include "models/error.h"

namespace zp = zeroplan;

namespace {

void print_events(const zp::EagerStep& step) {
  const auto module = [&](int id) {
    const zp::EagerModule& m = step.modules[static_cast<std::size_t>(id)];
    return fmt::format("{} ({})", m.name.empty() ? "root" : m.name, m.type);
  };
  fmt::print("start\n");
  for (const zp::EagerEvent& e : step.events) {
    switch (e.kind) {
      case zp::EagerEventKind::alloc:
        fmt::print("a {} {}\n", e.id, e.bytes);
        break;
      case zp::EagerEventKind::free:
        fmt::print("f {}\n", e.id);
        break;
      case zp::EagerEventKind::gradient:
        fmt::print("g {} {}\nf {}\n", step.parameters[static_cast<std::size_t>(e.id)].name, e.storage, e.storage);
        break;
      case zp::EagerEventKind::forward_pre:
        fmt::print("fpre {}\n", module(e.id));
        break;
      case zp::EagerEventKind::forward_post:
        fmt::print("fpost {}\n", module(e.id));
        break;
      case zp::EagerEventKind::backward_pre:
        fmt::print("bpre {}\n", module(e.id));
        break;
      case zp::EagerEventKind::backward_post:
        fmt::print("bpost {}\n", module(e.id));
        break;
      case zp::EagerEventKind::forward_end:
        fmt::print("fwd\n");
        break;
      case zp::EagerEventKind::backward_end:
        fmt::print("bwd\n");
        break;
      case zp::EagerEventKind::kernel:
      case zp::EagerEventKind::hold:
      case zp::EagerEventKind::let_go:
        break;
    }
  }
}

int events(int argc, char** argv) {
  zp::EagerOptions options;
  options.tokens = {std::stoll(argv[3]), std::stoll(argv[4])};
  options.checkpointing = std::string(argv[5]) == "1";
  for (int i = 6; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "attn=eager") options.attention = zp::EagerAttention::eager;
    if (word == "reent") options.reentrant = true;
    if (word == "keep") options.keeps_output = true;
    if (word == "dtype=fp32") options.type = zp::DType::fp32;
    if (word == "dtype=fp16") options.type = zp::DType::fp16;
    if (word.starts_with("lora=")) options.lora_rank = std::stoll(word.substr(5));
  }
  print_events(zp::eager_step(zp::find_model(argv[2]), options));
  return 0;
}

int rows(int argc, char** argv) {
  std::ifstream file(argv[2]);
  const std::string filter = argc > 3 ? argv[3] : "";
  std::map<std::string, std::string> refused;
  int count = 0, exact = 0, good = 0;
  for (std::string line; std::getline(file, line);) {
    const auto row = nlohmann::json::parse(line);
    const auto name = row.at("model").get<std::string>();
    if (name.find(filter) == std::string::npos && row.at("model_type") != filter) continue;
    zp::EagerOptions options;
    options.tokens = {row.at("mb").get<std::int64_t>(), row.at("seq").get<std::int64_t>()};
    options.checkpointing = row.at("ac") == 1;
    options.attention = row.at("attn") == "eager" ? zp::EagerAttention::eager : zp::EagerAttention::sdpa;
    ++count;
    try {
      const auto begin = std::chrono::steady_clock::now();
      const zp::EagerStep step = zp::eager_step(zp::find_model(name), options);
      const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
      const zp::EagerPeaks peaks = zp::eager_peaks(step);
      const auto error = [&](zp::Bytes value, const char* key) {
        const auto truth = row.at(key).get<double>();
        return 100 * (value.base() - truth) / truth;
      };
      const double saved = error(peaks.saved, "saved"), fwd = error(peaks.forward, "fwd_peak"),
                   bwd = error(peaks.backward, "bwd_peak");
      const double worst = std::max({std::abs(saved), std::abs(fwd), std::abs(bwd)});
      exact += worst == 0;
      good += worst <= 0.2;
      fmt::print("{:24} {:12} {}x{:<5} ac{} {:5}  saved {:9.4f} fwd {:9.4f} bwd {:9.4f} %  {:5.1f} ms {:6} events{}\n",
                 name, row.at("model_type").get<std::string>(), options.tokens.batch, options.tokens.seq_len,
                 options.checkpointing ? 1 : 0, row.at("attn").get<std::string>(), saved, fwd, bwd, ms,
                 step.events.size(),
                 worst == 0     ? " exact"
                 : worst <= 0.2 ? ""
                                : " BAD");
    } catch (const zp::InputError& refusal) {
      refused[row.at("model_type")] = refusal.what();
    }
  }
  for (const auto& [family, why] : refused) fmt::print("refused {}: {}\n", family, why);
  fmt::print("{} rows, {} exact, {} within 0.2 %\n", count, exact, good);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string command = argc > 1 ? argv[1] : "";
    if (command == "rows" && argc >= 3) return rows(argc, argv);
    if (command == "events" && argc >= 6) return events(argc, argv);
    fmt::print(stderr, "usage: eager_table rows FILE [FILTER] | events CONFIG MB SEQ AC [options]\n");
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
