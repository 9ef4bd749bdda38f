// fit_collectives COLLECTIVES.csv NCCL.csv: refits the ring law of models/catalog/fits/collectives.json, prints it, its
// errors, and what it says of each machine when all rows of that machine are left out. The first file is
// tests/data/collectives.csv, the second docs/measurements/h200x2/nccl.csv (forced protocols and channels; weight 0.4,
// as they are many rows of one machine). Nelder-Mead on the logarithms of the six numbers, soft L1 at 10 % of the
// logarithm of time; deterministic.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "sim/nccl_constants.h"
#include "sim/ring_law.h"

namespace {

using namespace zeroplan;

constexpr int kAnyProtocol = -1;
constexpr double kMiB = 1024.0 * 1024;

struct Row {
  std::string machine, group;  // group: rows reported together
  NvlinkRing ring;
  int protocol = kAnyProtocol;
  Bytes size, wire;
  double seconds = 0, weight = 1;
  bool fitted = true;
};

/// One GPU's NVLink rate and what eight reach in a large all-reduce over a ring, GB/s (models/catalog/fits).
struct Card {
  const char* machine;
  double link, asymptote;
};
constexpr Card kCards[] = {{"a100-sxm-8", 300, 235}, {"h200-8", 450, 367}, {"b200-8", 900, 680}};

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (const char c : line) {
    if (c == '"')
      quoted = !quoted;
    else if (c == ',' && !quoted)
      cells.emplace_back();
    else
      cells.back() += c;
  }
  return cells;
}

std::vector<std::vector<std::string>> read(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw std::runtime_error(path + ": cannot be read");
  std::string line;
  std::getline(in, line);
  std::vector<std::vector<std::string>> rows;
  while (std::getline(in, line)) rows.push_back(split(line));
  return rows;
}

Row make_row(const Card& card, int ranks, const std::string& collective, double bytes, double gigabytes_per_second) {
  Row row;
  row.machine = card.machine;
  row.ring.ranks = ranks;
  row.ring.all_reduce = collective.starts_with("all_reduce");
  row.ring.link = BytesPerSecond(card.link * 1e9);
  row.ring.asymptote = BytesPerSecond(card.asymptote * 1e9);
  row.size = Bytes(bytes);
  row.wire = Bytes(bytes * (ranks - 1) / ranks * (row.ring.all_reduce ? 2 : 1));
  row.seconds = row.wire.base() / (gigabytes_per_second * 1e9);
  return row;
}

/// Rings of one NVSwitch node from 1 MiB on. SimuMax's points are its fit, not measurements: compared, not fitted.
std::vector<Row> published(const std::string& path) {
  std::vector<Row> rows;
  for (const auto& cells : read(path)) {
    const auto card = std::ranges::find(kCards, cells[0], [](const Card& c) { return std::string(c.machine); });
    const int ranks = std::stoi(cells[1]);
    const double bytes = std::stod(cells[4]);
    if (card == std::end(kCards) || cells[2] != "1" || bytes < kMiB) continue;
    const bool in_switch =
        cells[3] == "all_reduce" && ((cells[0] == "h200-8" && ranks >= 5) || (cells[0] == "b200-8" && ranks >= 6));
    if (in_switch) continue;
    Row row = make_row(*card, ranks, cells[3], bytes, std::stod(cells[5]));
    row.fitted = cells[6].find("SimuMax") == std::string::npos;
    row.group = cells[0] + (row.fitted ? "" : " (SimuMax's fit)") + ", " + cells[1] + " ranks, " + cells[3];
    if (ranks == 2) row.weight = 0.4;
    rows.push_back(row);
  }
  return rows;
}

/// Ring/LL, Ring/LL128, Ring/Simple and Ring/Simple/CHANNELS.
std::vector<Row> forced(const std::string& path) {
  constexpr std::array<const char*, 3> names = {"LL", "LL128", "Simple"};
  std::vector<Row> rows;
  for (const auto& cells : read(path)) {
    std::stringstream config(cells[0]);
    std::string algorithm, protocol, channels;
    std::getline(config, algorithm, '/');
    std::getline(config, protocol, '/');
    std::getline(config, channels);
    const double bytes = std::stod(cells[3]);
    // Below 4 MiB the host's launches decide (13 to 25 us a call, by process); LL is not used for large messages.
    if (algorithm != "Ring" || bytes < 4 * kMiB || (protocol == "LL" && bytes > 64 * kMiB)) continue;
    Row row = make_row(kCards[1], std::stoi(cells[2]), cells[1], bytes, std::stod(cells[7]));
    row.protocol = static_cast<int>(std::ranges::find(names, protocol) - names.begin());
    if (!channels.empty()) row.ring.channels = std::stoi(channels);
    row.group = "h200-8, 2 ranks, forced " + cells[0];
    row.weight = 0.4;
    rows.push_back(row);
  }
  return rows;
}

double predicted(const RingLaw& law, const Row& row) {
  const double waits = law.skew.base() * (row.ring.ranks - 2);
  if (row.protocol != kAnyProtocol)
    return waits + ring_time(law, row.ring, static_cast<std::size_t>(row.protocol), row.wire).total().base();
  double least = 1e9;
  for (const std::size_t protocol : {nccl::kLL, nccl::kLL128, nccl::kSimple})
    least = std::min(least, ring_time(law, row.ring, protocol, row.wire).total().base());
  return waits + least;
}

constexpr std::size_t kNumbers = 6;
using Point = std::array<double, kNumbers>;  // logarithms

RingLaw law_of(const Point& p) {
  RingLaw law;
  law.channel = std::exp(p[0]);
  law.ll_channel = std::exp(p[1]);
  law.corner = 1 + std::exp(p[2]);
  law.ramp_loss = std::exp(p[3]);
  law.ramp_exponent = std::exp(p[4]);
  law.skew = Seconds(std::exp(p[5]) * 1e-6);
  return law;
}

double cost(const Point& point, const std::vector<Row>& rows) {
  constexpr double kSoft = 0.1;
  const RingLaw law = law_of(point);
  if (law.ramp_exponent > 0.9) return 1e9;
  double sum = 0;
  for (const Row& row : rows) {
    const double error = row.weight * std::log(predicted(law, row) / row.seconds) / kSoft;
    sum += std::sqrt(1 + error * error) - 1;
  }
  return sum;
}

/// Nelder and Mead's simplex with the usual coefficients.
Point minimised(const std::function<double(const Point&)>& f, Point start) {
  struct Vertex {
    Point at;
    double value;
  };
  std::vector<Vertex> simplex{{start, f(start)}};
  for (std::size_t k = 0; k < kNumbers; ++k) {
    Point p = start;
    p[k] += 0.3;
    simplex.push_back({p, f(p)});
  }
  const auto towards = [&](const Point& from, const Point& to, double part) {
    Point p{};
    for (std::size_t k = 0; k < kNumbers; ++k) p[k] = from[k] + part * (to[k] - from[k]);
    return Vertex{p, f(p)};
  };
  for (int step = 0; step < 4000; ++step) {
    std::ranges::stable_sort(simplex, {}, &Vertex::value);
    Point centre{};
    for (std::size_t v = 0; v < kNumbers; ++v)
      for (std::size_t k = 0; k < kNumbers; ++k) centre[k] += simplex[v].at[k] / kNumbers;
    Vertex& worst = simplex.back();
    const Vertex mirrored = towards(worst.at, centre, 2);
    if (mirrored.value < simplex.front().value) {
      const Vertex further = towards(worst.at, centre, 3);
      worst = further.value < mirrored.value ? further : mirrored;
    } else if (mirrored.value < simplex[kNumbers - 1].value) {
      worst = mirrored;
    } else if (const Vertex nearer = towards(worst.at, centre, 0.5); nearer.value < worst.value) {
      worst = nearer;
    } else {
      for (std::size_t v = 1; v <= kNumbers; ++v) simplex[v] = towards(simplex[0].at, simplex[v].at, 0.5);
    }
  }
  return std::ranges::min_element(simplex, {}, &Vertex::value)->at;
}

/// The A100's are the only measured rings of eight ranks below 256 MiB: without them SimuMax's fit must say what the
/// skew of eight is.
RingLaw fitted(const std::vector<Row>& all, const std::string& without) {
  std::vector<Row> rows;
  for (const Row& row : all)
    if ((row.fitted || without == "a100-sxm-8") && row.machine != without) rows.push_back(row);
  const Point start = {std::log(0.08), std::log(0.02), std::log(0.5), std::log(0.05), std::log(0.25), std::log(5.0)};
  const auto f = [&](const Point& p) { return cost(p, rows); };
  return law_of(minimised(f, minimised(f, start)));
}

void print(const RingLaw& law) {
  fmt::print(
      "channel {:.4f}, ll_channel {:.4f}, corner {:.3f}, ramp_loss {:.4f}, ramp_exponent {:.3f}, skew {:.2f} "
      "us\n",
      law.channel, law.ll_channel, law.corner, law.ramp_loss, law.ramp_exponent, law.skew.base() * 1e6);
}

void print_errors(const RingLaw& law, const std::vector<Row>& rows, const std::string& only) {
  std::vector<std::string> groups;
  for (const Row& row : rows)
    if ((only.empty() || row.machine == only) && std::ranges::find(groups, row.group) == groups.end())
      groups.push_back(row.group);
  for (const bool large : {false, true}) {
    for (const std::string& group : groups) {
      double sum = 0, bias = 0, worst = 0;
      int n = 0;
      for (const Row& row : rows) {
        if (row.group != group || (row.size >= Bytes(256 * kMiB)) != large) continue;
        const double error = row.seconds / predicted(law, row) - 1;  // of bandwidth
        sum += std::abs(error);
        bias += std::log(1 + error);
        worst = std::max(worst, std::abs(error));
        ++n;
      }
      if (n > 0)
        fmt::print("  {:<52} {} n {:>2}  MAPE {:>5.1f} %  bias {:>+6.1f} %  worst {:>5.1f} %\n", group,
                   large ? ">= 256 MiB" : "1-256 MiB ", n, 100 * sum / n, 100 * (std::exp(bias / n) - 1), 100 * worst);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fmt::print(stderr, "usage: fit_collectives COLLECTIVES.csv NCCL.csv\n");
    return 2;
  }
  std::vector<Row> rows = published(argv[1]);
  for (const Row& row : forced(argv[2])) rows.push_back(row);
  const RingLaw law = fitted(rows, "");
  fmt::print("fitted to all:\n");
  print(law);
  print_errors(law, rows, "");
  for (const Card& card : kCards) {
    const RingLaw other = fitted(rows, card.machine);
    fmt::print("{} left out:\n", card.machine);
    print(other);
    print_errors(other, rows, card.machine);
  }
  return 0;
}
