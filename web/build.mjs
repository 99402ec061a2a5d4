// Bundles src/ into the folder that is given, with the licences of what is in the bundle.
import { build } from "esbuild";
import { cpSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";

const out = process.argv[2];
rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
await build({
  entryPoints: ["src/app.tsx"],
  outdir: out,
  bundle: true,
  splitting: true,
  chunkNames: "[name]", // what the pages load later, and what both share
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
});
cpSync("src/index.html", `${out}/index.html`);
cpSync("src/icon.svg", `${out}/icon.svg`);
const names = ["preact", "@preact/signals", "@preact/signals-core", "uplot"];
const texts = names.map((name) => {
  const folder = `node_modules/${name}`;
  const { version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
  const file = readdirSync(folder).find((one) => /^licen[sc]e/i.test(one));
  return `${name} ${version} (${license})\n\n${readFileSync(`${folder}/${file}`, "utf8")}`;
});
writeFileSync(`${out}/licences.txt`, texts.join("\n\n----\n\n"));
