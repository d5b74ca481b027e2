# Writes OUTPUT, which defines what embedded_facts.h declares, from FILES (separated by commas) of
# DIRECTORY.
#   cmake -DDIRECTORY=... -DFILES=a.json,b.json -DOUTPUT=... -P embed_facts.cmake
string(REPLACE "," ";" files "${FILES}")
set(entries "")
foreach(file IN LISTS files)
  file(READ ${DIRECTORY}/${file} text)
  string(APPEND entries "    {\"${file}\", R\"facts(${text})facts\"},\n")
endforeach()
file(WRITE ${OUTPUT} "#include \"machine/embedded_facts.h\"

namespace switchyard::machine {
namespace {

constexpr EmbeddedFacts kFacts[] = {
${entries}};

}  // namespace

std::span<const EmbeddedFacts> embedded_facts() { return kFacts; }

}  // namespace switchyard::machine
")
