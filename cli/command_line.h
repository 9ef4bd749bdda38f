#pragma once
// The flags of one command. CLI11 matches and documents them; every value stays text, because CLI11 2.1.2 turns an
// integer that overflows into INT64_MAX and lets an empty "--model=" swallow the next flag. Parsers: cli/values.h.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace zeroplan {

class CommandLine {
 public:
  /// `example` is shown below the flags by --help.
  CommandLine(std::string_view command, std::string_view summary, std::string_view example);
  ~CommandLine();

  /// A flag with a value: "--model", "MODEL", help. The target stays empty when the flag is not given.
  void value(const std::string& flag, const std::string& placeholder, const std::string& help, std::string& target);
  /// A flag without a value.
  void toggle(const std::string& flag, const std::string& help, bool& target);
  /// An argument by position, not required by CLI11: the command says what it misses.
  void positional(const std::string& name, const std::string& help, std::string& target);
  /// Any number of arguments by position.
  void positionals(const std::string& name, const std::string& help, std::vector<std::string>& target);
  /// Flags added from here on are listed under this title.
  void group(std::string title);

  /// Reads the arguments after the command's name. False: --help was asked for. Throws InputError in one line: an
  /// unknown flag (with the nearest one), a missing or empty value, a flag given twice, an argument too many.
  bool parse(const std::vector<std::string>& arguments);
  /// What --help prints.
  std::string help() const;

 private:
  struct App;
  std::vector<std::string> checked(const std::vector<std::string>& arguments) const;
  std::unique_ptr<App> app_;
};

}  // namespace zeroplan
