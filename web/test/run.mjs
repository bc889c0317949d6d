/** Bundles each test with what it tests, and runs them all in Node's own runner. */
import { mkdtemp, readdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import path from "node:path";
import { spawnSync } from "node:child_process";
import { fileURLToPath } from "node:url";
import esbuild from "esbuild";

const HERE = path.dirname(fileURLToPath(import.meta.url));
const out = await mkdtemp(path.join(tmpdir(), "perilune-web-test-"));
const tests = (await readdir(HERE)).filter((name) => /\.test\.tsx?$/.test(name)).map((name) => path.join(HERE, name));
await esbuild.build({
  entryPoints: tests,
  bundle: true,
  platform: "node",
  format: "esm",
  outdir: out,
  outExtension: { ".js": ".mjs" },
  jsx: "automatic",
  jsxImportSource: "preact",
  loader: { ".css": "local-css" },
  external: ["katex"],
  define: { FORMULA_STYLES: '""', HIGHLIGHTER: '""' },
  logLevel: "warning",
});
const files = (await readdir(out)).filter((name) => name.endsWith(".mjs")).map((name) => path.join(out, name));
const done = spawnSync(process.execPath, ["--test", ...files], { stdio: "inherit" });
await rm(out, { recursive: true });
process.exit(done.status ?? 1);
