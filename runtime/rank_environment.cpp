#include "runtime/rank_environment.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "models/error.h"
#include "models/units.h"

namespace zeroplan {

std::string_view to_string(RankSource source) {
  switch (source) {
    case RankSource::torchrun:
      return "torchrun";
    case RankSource::open_mpi:
      return "Open MPI";
    case RankSource::pmi:
      return "PMI";
    case RankSource::slurm:
      return "Slurm";
    case RankSource::one_process:
      return "one process";
  }
  return "an unknown launcher";
}

namespace {

constexpr std::int64_t kMostRanks = 1'000'000;

/// The variables of one launcher. `host_size`, where there is one, is the number of ranks on this host.
struct Variables {
  RankSource source;
  std::string_view rank, size, local_rank, host_size;
};
constexpr Variables kLaunchers[] = {
    {RankSource::torchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK", ""},
    {RankSource::open_mpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {RankSource::pmi, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {RankSource::slurm, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""},
};

int integer_of(const EnvironmentLookup& lookup, std::string_view name, std::string_view because, std::int64_t low,
               std::int64_t high) {
  const std::optional<std::string> value = lookup(name);
  if (!value) throw InputError(fmt::format("{} is not set, but {} is", name, because));
  return static_cast<int>(parse_integer(*value, name, low, high));
}

std::string text_of(const EnvironmentLookup& lookup, std::string_view name) {
  const std::string value = lookup(name).value_or("");
  if (value.empty()) throw InputError(fmt::format("{}: expected the host of rank 0, found nothing", name));
  return value;
}

/// The host of rank 0.
std::string master_of(const EnvironmentLookup& lookup, const Variables& launcher, int size) {
  if (lookup("MASTER_ADDR")) return text_of(lookup, "MASTER_ADDR");
  if (launcher.source == RankSource::slurm) {
    // A step may have fewer hosts than its allocation, which the other two list.
    for (const std::string_view name : {"SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"}) {
      if (lookup(name)) return first_host(text_of(lookup, name), name);
    }
  }
  const std::string this_host = RankEnvironment{}.master_address;
  if (size == 1) return this_host;
  const bool counted = !launcher.host_size.empty() && lookup(launcher.host_size).has_value();
  if (counted && integer_of(lookup, launcher.host_size, launcher.rank, 1, size) == size) return this_host;
  throw InputError(
      fmt::format("MASTER_ADDR is not set: {} ranks of {} need the host of rank 0", size, to_string(launcher.source)));
}

/// A batch script has the task count of its allocation and the number 0 without being a task: no step counts it.
bool is_task(const EnvironmentLookup& lookup, const Variables& launcher) {
  if (!lookup(launcher.rank)) return false;
  return launcher.source != RankSource::slurm || lookup("SLURM_STEP_ID") || lookup("SLURM_STEPID");
}

/// What the launcher calls this job; empty where it has no name, or none that all ranks share.
std::string job_of(const EnvironmentLookup& lookup, const Variables& launcher) {
  if (launcher.source == RankSource::open_mpi) return lookup("PMIX_NAMESPACE").value_or("");
  // Parts of a heterogeneous job have numbers of their own.
  if (launcher.source != RankSource::slurm || lookup("SLURM_HET_SIZE")) return "";
  const std::optional<std::string> job = lookup("SLURM_JOB_ID"), step = lookup("SLURM_STEP_ID");
  return job && step ? *job + "." + *step : "";
}

/// Jobs that start together on one host mostly meet at ports of their own: below those that systems give to clients
/// (32768 on Linux) and above most services.
int port_of_job(std::string_view job) {
  constexpr int kFirst = 20000, kPorts = 9000;
  std::uint32_t hash = 2166136261U;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return kFirst + static_cast<int>(hash % kPorts);
}

RankEnvironment read_launcher(const EnvironmentLookup& lookup, const Variables& launcher) {
  RankEnvironment result;
  result.source = launcher.source;
  result.size = integer_of(lookup, launcher.size, launcher.rank, 1, kMostRanks);
  result.rank = integer_of(lookup, launcher.rank, launcher.size, 0, result.size - 1);
  result.local_rank = integer_of(lookup, launcher.local_rank, launcher.rank, 0, result.size - 1);
  result.master_address = master_of(lookup, launcher, result.size);
  result.job = job_of(lookup, launcher);
  if (!result.job.empty()) result.master_port = port_of_job(result.job);
  if (lookup("MASTER_PORT")) result.master_port = integer_of(lookup, "MASTER_PORT", "MASTER_ADDR", 1, 65535);
  return result;
}

}  // namespace

RankEnvironment read_rank_environment(const EnvironmentLookup& lookup) {
  // A shell inside an allocation has Slurm's task count without being a task; a size alone says that only for torchrun.
  if (lookup("WORLD_SIZE") && !lookup("RANK")) throw InputError("RANK is not set, but WORLD_SIZE is");
  for (const Variables& launcher : kLaunchers) {
    if (is_task(lookup, launcher)) return read_launcher(lookup, launcher);
  }
  return {};
}

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_host(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '.' || c == '_'; }

/// Takes the characters at the front that `belongs` accepts.
template <class Belongs>
std::string_view take(std::string_view& text, Belongs belongs) {
  const auto end = std::find_if_not(text.begin(), text.end(), belongs);
  const std::string_view taken = text.substr(0, static_cast<std::size_t>(end - text.begin()));
  text.remove_prefix(taken.size());
  return taken;
}

bool take_one(std::string_view& text, char c) {
  if (text.empty() || text.front() != c) return false;
  text.remove_prefix(1);
  return true;
}

/// Takes "03-05,9]", what follows a '[': its first number, or nullopt for another form.
std::optional<std::string_view> take_ranges(std::string_view& text) {
  std::optional<std::string_view> first;
  do {
    const std::string_view low = take(text, is_digit);
    const bool range = take_one(text, '-');
    const std::string_view high = range ? take(text, is_digit) : low;
    if (low.empty() || high.empty()) return std::nullopt;
    // Compared as texts: Slurm pads both ends of a range to one width, or the longer number is the larger.
    if (high.size() < low.size() || (high.size() == low.size() && high < low)) return std::nullopt;
    if (!first) first = low;
  } while (take_one(text, ','));
  return take_one(text, ']') ? first : std::nullopt;
}

/// Takes one entry of the list: its first host, or nullopt for another form.
std::optional<std::string> take_entry(std::string_view& text) {
  std::string host;
  while (!text.empty() && text.front() != ',') {
    if (take_one(text, '[')) {
      const std::optional<std::string_view> number = take_ranges(text);
      if (!number) return std::nullopt;
      host += *number;
    } else {
      const std::string_view name = take(text, is_host);
      if (name.empty()) return std::nullopt;
      host += name;
    }
  }
  return host.empty() ? std::nullopt : std::optional(host);
}

}  // namespace

std::string first_host(std::string_view list, std::string_view what) {
  std::string_view rest = list;
  std::optional<std::string> first;
  do {
    const std::optional<std::string> host = take_entry(rest);
    if (!host) {
      throw InputError(fmt::format("{}: expected hosts such as node[03-05,9],login1, found \"{}\"", what, list));
    }
    if (!first) first = host;
  } while (take_one(rest, ','));
  return *first;
}

}  // namespace zeroplan
