#include "cli/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <set>

#include "models/error.h"

namespace zeroplan {
namespace {

constexpr std::size_t kHelpColumn = 36;  // where descriptions start: the longest flag with its placeholder

bool is_flag(std::string_view argument) { return argument.size() > 2 && argument.starts_with("--"); }

void check_positional(const std::string& argument) {
  if (argument.empty()) throw InputError("expected an argument, got an empty text");
  if (argument.starts_with('-') && argument != "-h") {
    throw InputError(fmt::format("{}: no such flag; flags are written --name (see --help)", argument));
  }
}

[[noreturn]] void refuse_value(const CLI::Option& option, const std::string& flag, std::string_view found) {
  throw InputError(fmt::format("{}: expected {}, got {}", flag, option.get_type_name(), found));
}

/// "--model=70B".
std::string with_value(const CLI::Option& option, const std::string& flag, const std::string& value) {
  if (value.empty()) refuse_value(option, flag, "an empty text");
  return flag + "=" + value;
}

}  // namespace

struct CommandLine::App {
  explicit App(std::string_view command, std::string_view summary)
      : app(std::string(summary), fmt::format("zeroplan {}", command)) {
    app.set_help_flag("-h,--help", "Print this help");
    app.get_formatter()->column_width(kHelpColumn);
    app.allow_windows_style_options(false);
  }

  /// "--json" -> its option; nullptr when there is none.
  const CLI::Option* find(const std::string& flag) const { return app.get_option_no_throw(flag); }

  std::vector<std::string> flags() const {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
    return names;
  }

  CLI::App app;
  std::string group = "Flags";
};

CommandLine::CommandLine(std::string_view command, std::string_view summary, std::string_view example)
    : app_(std::make_unique<App>(command, summary)) {
  app_->app.footer(std::string(example));
}

CommandLine::~CommandLine() = default;

void CommandLine::value(const std::string& flag, const std::string& placeholder, const std::string& help,
                        std::string& target) {
  app_->app.add_option(flag, target, help)->type_name(placeholder)->group(app_->group);
}

void CommandLine::toggle(const std::string& flag, const std::string& help, bool& target) {
  app_->app.add_flag(flag, target, help)->group(app_->group);
}

void CommandLine::positional(const std::string& name, const std::string& help, std::string& target) {
  app_->app.add_option(name, target, help)->type_name(" ");
}

void CommandLine::positionals(const std::string& name, const std::string& help, std::vector<std::string>& target) {
  app_->app.add_option(name, target, help)->type_name(" ");
}

void CommandLine::group(std::string title) { app_->group = std::move(title); }

/// The arguments with every value joined to its flag, "--model=70B": nothing is left for CLI11 to guess.
std::vector<std::string> CommandLine::checked(const std::vector<std::string>& arguments) const {
  std::vector<std::string> result;
  std::set<std::string> seen;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (!is_flag(argument)) {
      check_positional(argument);
      result.push_back(argument);
      continue;
    }
    const std::size_t equals = argument.find('=');
    const std::string flag = argument.substr(0, equals);
    const CLI::Option* option = app_->find(flag);
    if (option == nullptr) {
      throw InputError(fmt::format("{}: no such flag; {}", flag, did_you_mean(flag, app_->flags())));
    }
    if (!seen.insert(flag).second) throw InputError(fmt::format("{}: given twice", flag));
    if (option->get_expected_max() == 0) {
      if (equals != std::string::npos) throw InputError(fmt::format("{}: takes no value, got \"{}\"", flag, argument));
      result.push_back(argument);
    } else if (equals != std::string::npos) {
      result.push_back(with_value(*option, flag, argument.substr(equals + 1)));
    } else {
      ++i;
      if (i == arguments.size()) refuse_value(*option, flag, "nothing");
      if (is_flag(arguments[i])) refuse_value(*option, flag, "the flag " + arguments[i]);
      result.push_back(with_value(*option, flag, arguments[i]));
    }
  }
  return result;
}

bool CommandLine::parse(const std::vector<std::string>& arguments) {
  if (std::ranges::find(arguments, "--help") != arguments.end()) return false;
  std::vector<std::string> reversed = checked(arguments);
  std::ranges::reverse(reversed);  // CLI11 takes its arguments from the back
  try {
    app_->app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    return false;
  } catch (const CLI::ExtrasError&) {
    throw InputError(fmt::format("unexpected argument \"{}\"", app_->app.remaining().front()));
  } catch (const CLI::ParseError& error) {
    throw InputError(error.what());
  }
  return true;
}

std::string CommandLine::help() const { return app_->app.help(); }

}  // namespace zeroplan
