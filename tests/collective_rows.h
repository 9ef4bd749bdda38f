#pragma once
// Measured bus bandwidths (tests/data/collectives*.csv) and what the model says of them.

#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "sim/collective_model.h"
#include "tests/sim_machines.h"

namespace zeroplan::tests {

struct Measured {
  std::string machine, collective, source;
  RankGroup group;
  Bytes size;
  double gigabytes_per_second = 0;
  bool fitted = false;  // the model's tables or fractions were made from this row
  bool large() const { return size >= Bytes(256 * 1024.0 * 1024); }
};

/// Throws std::runtime_error when the file cannot be read.
inline std::vector<Measured> measured_rows(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw std::runtime_error(path + ": cannot be read");
  std::string line;
  std::getline(in, line);
  std::vector<Measured> rows;
  while (std::getline(in, line)) {
    std::stringstream cells(line);
    std::string ranks, nodes, bytes, rate;
    Measured row;
    std::getline(cells, row.machine, ',');
    std::getline(cells, ranks, ',');
    std::getline(cells, nodes, ',');
    std::getline(cells, row.collective, ',');
    std::getline(cells, bytes, ',');
    std::getline(cells, rate, ',');
    std::getline(cells, row.source);
    row.fitted = row.source.back() != ',';
    row.group = {std::stoi(ranks), std::stoi(nodes), std::stoi(ranks) / std::stoi(nodes)};
    row.size = Bytes(std::stod(bytes));
    row.gigabytes_per_second = std::stod(rate);
    rows.push_back(row);
  }
  return rows;
}

/// nccl-tests queues its calls, ml-engineering's all_reduce_bench.py waits for each; SimuMax timed PyTorch.
inline CollectiveSetting setting_of(const Measured& row) {
  const auto says = [&row](const char* text) { return row.source.find(text) != std::string::npos; };
  const bool waits = says("all_reduce_bench") || says("mle-net") || says("simumax");
  return waits && row.machine != "a100-sxm-8" ? CollectiveSetting::isolated : CollectiveSetting::queued;
}

/// Bus bandwidth in GB/s. Ring all-reduces with NVLS off are compared with the all-gather's ring: equal bus bandwidth.
inline double predicted(const Measured& row, const CollectiveTables& tables = builtin_collective_tables()) {
  const CollectiveModel model(measured_machine(row.machine), setting_of(row), tables);
  const CollectiveKind kind = row.collective == "all_reduce"       ? CollectiveKind::all_reduce
                              : row.collective == "reduce_scatter" ? CollectiveKind::reduce_scatter
                                                                   : CollectiveKind::all_gather;
  return model.cost(kind, row.size, row.group).effective_bandwidth().base() / 1e9;
}

/// The tables as a machine without a measured table of its own sees them.
inline CollectiveTables without_ramps() {
  CollectiveTables tables = builtin_collective_tables();
  tables.ramps.clear();
  return tables;
}

}  // namespace zeroplan::tests
