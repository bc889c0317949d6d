/**
 * Builds the page: web/src -> perilune/web/dist. The same sources give the same bytes (tests/web rebuilds and compares).
 *
 * Two passes: what the page loads on demand by address (the styles of formulas, the highlighting worker) comes first,
 * so that the page's code can name the hashed files.
 */
import { createHash } from "node:crypto";
import { mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import esbuild from "esbuild";

const HERE = path.dirname(fileURLToPath(import.meta.url));
const OUT = path.resolve(process.argv[2] ?? path.join(HERE, "../perilune/web/dist"));

/** KaTeX names three formats of each font; every browser that can run the page takes the first, woff2. */
const onlyWoff2 = {
  name: "only-woff2",
  setup(build) {
    build.onLoad({ filter: /katex\.css$/ }, async ({ path: file }) => ({
      contents: (await readFile(file, "utf8")).replace(/,\s*url\([^)]*\.(woff|ttf)\)\s*format\([^)]*\)/g, ""),
      loader: "css",
    }));
  },
};

const shared = {
  absWorkingDir: HERE,
  bundle: true,
  minify: true,
  write: false,
  metafile: true,
  charset: "utf8",
  legalComments: "none",
  target: ["chrome123", "firefox121", "safari17.5"],
  outdir: OUT,
  entryNames: "assets/[name]-[hash]",
  chunkNames: "assets/[name]-[hash]",
  assetNames: "assets/[name]-[hash]",
  publicPath: "/",
  loader: { ".woff2": "file", ".svg": "file" },
  plugins: [onlyWoff2],
};

/** The address of the output that an entry point became. */
function addressOf(result, entry, extension) {
  const found = Object.entries(result.metafile.outputs).find(
    ([name, output]) => output.entryPoint === entry && name.endsWith(extension),
  );
  if (!found) throw new Error(`${entry} gave no ${extension}`);
  return "/" + path.relative(OUT, path.resolve(HERE, found[0])).replaceAll(path.sep, "/");
}

async function write(result) {
  for (const file of result.outputFiles) {
    await mkdir(path.dirname(file.path), { recursive: true });
    await writeFile(file.path, file.contents);
  }
}

/** The licences of everything that is in the bundle, as their authors ask. */
async function licences(results) {
  const packages = new Set();
  for (const result of results) {
    for (const input of Object.keys(result.metafile.inputs)) {
      const found = /^(?:.*\/)?node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input);
      if (found) packages.add(input.slice(0, input.indexOf(found[1]) + found[1].length));
    }
  }
  const parts = [];
  for (const folder of [...packages].sort()) {
    const { name, version, license } = JSON.parse(await readFile(path.join(HERE, folder, "package.json"), "utf8"));
    const file = (await readdir(path.join(HERE, folder))).sort().find((each) => /^licen[cs]e/i.test(each));
    const text = file ? await readFile(path.join(HERE, folder, file), "utf8") : "";
    parts.push(`${name} ${version} (${license})\n\n${text.trim()}\n`);
  }
  return parts.join(`\n${"-".repeat(80)}\n\n`);
}

async function main() {
  await rm(OUT, { recursive: true, force: true });
  const later = await esbuild.build({
    ...shared,
    entryPoints: ["src/markdown/formula.css", "src/markdown/highlighter.ts", "src/boot.ts"],
    format: "iife",
  });
  const page = await esbuild.build({
    ...shared,
    entryPoints: ["src/main.tsx"],
    format: "esm",
    splitting: true,
    jsx: "automatic",
    jsxImportSource: "preact",
    define: {
      FORMULA_STYLES: JSON.stringify(addressOf(later, "src/markdown/formula.css", ".css")),
      HIGHLIGHTER: JSON.stringify(addressOf(later, "src/markdown/highlighter.ts", ".js")),
    },
  });
  const mark = await readFile(path.join(HERE, "src/design/mark.svg"));
  const markAddress = `/assets/mark-${createHash("sha256").update(mark).digest("hex").slice(0, 8).toUpperCase()}.svg`;
  const html = (await readFile(path.join(HERE, "src/index.html"), "utf8"))
    .replace("{{boot}}", addressOf(later, "src/boot.ts", ".js"))
    .replace("{{script}}", addressOf(page, "src/main.tsx", ".js"))
    .replace("{{styles}}", addressOf(page, "src/main.tsx", ".js").replace(/[^/]*$/, "") + stylesOf(page))
    .replace("{{mark}}", markAddress);
  await write(later);
  await write(page);
  await writeFile(path.join(OUT, markAddress.slice(1)), mark);
  await writeFile(path.join(OUT, "index.html"), html);
  await writeFile(path.join(OUT, "LICENSES.txt"), await licences([later, page]));
}

/** The page's stylesheet: the one that came with main.tsx. */
function stylesOf(page) {
  const output = Object.values(page.metafile.outputs).find((each) => each.entryPoint === "src/main.tsx");
  if (!output?.cssBundle) throw new Error("src/main.tsx gave no stylesheet");
  return path.basename(output.cssBundle);
}

const PACKED = /\.(js|css)$/;
const SMALL_BYTES = 1024;

/** X.gz beside X, which the server sends to browsers that take it. */
async function pack() {
  const folder = path.join(OUT, "assets");
  for (const name of (await readdir(folder)).filter((each) => PACKED.test(each))) {
    const data = await readFile(path.join(folder, name));
    if (data.length > SMALL_BYTES) await writeFile(path.join(folder, `${name}.gz`), gzipSync(data, { level: 9 }));
  }
}

await main();
await pack();
