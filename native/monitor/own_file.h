// Files that this process writes without Python, where other users may write, too (pycollective/files.py).

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_OWN_FILE_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_OWN_FILE_H_

#include <string>

namespace pycollective {

// Writes a file in a folder of this user's, which it makes if there is none; nobody else can read the folder. The file is written
// under a new name, and then takes its own: a reader sees all of it, and no link that lies there leads elsewhere. Returns "", or
// why there is no such file.
std::string WriteOwnFile(const std::string& folder, const std::string& name, const std::string& text);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_OWN_FILE_H_
