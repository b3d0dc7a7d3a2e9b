// Implementation of own_file.h.

#include "monitor/own_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "monitor/hmac.h"

namespace pycollective {
namespace {

std::string Error() { return std::strerror(errno); }

// A name that nobody can guess.
std::string NewName(const std::string& name) {
  return "." + name + "." + Hex(RandomBytes(8)) + ".part";
}

std::string WriteIn(int folder, const std::string& name, const std::string& text) {
  const std::string part = NewName(name);
  const int file = openat(folder, part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (file < 0) return Error();
  std::string wrong;
  for (size_t done = 0; done < text.size() && wrong.empty();) {
    const ssize_t n = write(file, text.data() + done, text.size() - done);
    if (n > 0) done += static_cast<size_t>(n);
    if (n < 0 && errno != EINTR) wrong = Error();
  }
  if (close(file) != 0 && wrong.empty()) wrong = Error();
  if (wrong.empty() && renameat(folder, part.c_str(), folder, name.c_str()) != 0) wrong = Error();
  if (!wrong.empty()) unlinkat(folder, part.c_str(), 0);
  return wrong;
}

}  // namespace

std::string WriteOwnFile(const std::string& folder, const std::string& name, const std::string& text) {
  for (size_t slash = folder.find('/', 1);; slash = folder.find('/', slash + 1)) {
    mkdir(folder.substr(0, slash).c_str(), 0700);
    if (slash == std::string::npos) break;
  }
  const int opened = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (opened < 0) return errno == ELOOP || errno == ENOTDIR ? "it is a link or a file, not a folder" : Error();
  struct stat about{};
  std::string wrong;
  if (fstat(opened, &about) != 0) {
    wrong = Error();
  } else if (about.st_uid != geteuid()) {
    wrong = "it belongs to user " + std::to_string(about.st_uid) + ", not to " + std::to_string(geteuid());
  } else {
    wrong = WriteIn(opened, name, text);
  }
  close(opened);
  return wrong;
}

}  // namespace pycollective
