// On a phone a row of a table is a block (site.css). So each cell notes the name of its column.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const names = [...table.querySelectorAll("thead th")].map((name) => name.textContent.trim());
  for (const row of table.querySelectorAll("tbody tr"))
    [...row.cells].forEach((cell, n) => { if (n && names[n]) cell.dataset.column = names[n]; });
}
