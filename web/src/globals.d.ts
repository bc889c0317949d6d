/** What the build puts in: addresses of files that are loaded on demand. */
declare const FORMULA_STYLES: string;
declare const HIGHLIGHTER: string;

declare module "*.module.css" {
  const names: Record<string, string>;
  export default names;
}
declare module "*.css";
