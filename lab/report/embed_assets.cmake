# Writes OUTPUT, which defines what assets.h declares, from the files of DIRECTORY.
#   cmake -DDIRECTORY=... -DOUTPUT=... -P embed_assets.cmake
set(source "#include \"report/assets.h\"\n\nnamespace switchyard::report::assets {\n\n")
foreach(asset IN ITEMS kPage=page.html kStyle=page.css kPlot=plot.js kCharts=charts.js
                       kTuning=tuning.js kRouting=routing.js kLadder=ladder.js kTables=tables.js kTimeline=timeline.js
                       kMain=main.js)
  string(REGEX MATCH "^([^=]+)=(.+)$" matched ${asset})
  set(name ${CMAKE_MATCH_1})
  file(READ ${DIRECTORY}/${CMAKE_MATCH_2} text)
  string(APPEND source "const std::string_view ${name} = R\"asset(${text})asset\";\n\n")
endforeach()
string(APPEND source "}  // namespace switchyard::report::assets\n")
file(WRITE ${OUTPUT} "${source}")
