// Writes the console into the gateway's package, or into the folder that is named.
import { copyFileSync, mkdirSync, readFileSync } from "node:fs";
import { build } from "esbuild";

const out = process.argv[2] ?? "../gateway/api/console/static";
mkdirSync(out, { recursive: true });
await build({
  entryPoints: { console: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  charset: "utf8",
  footer: { js: `/* Contains Preact.\n${readFileSync("node_modules/preact/LICENSE", "utf8")}*/` },
  format: "iife",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  logLevel: "warning",
});
copyFileSync("src/index.html", `${out}/index.html`);
copyFileSync("src/style.css", `${out}/console.css`);
copyFileSync("src/demo/recording.json", `${out}/recording.json`);
