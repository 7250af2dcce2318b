// Writes down what the package offers to its users, or checks that api.json is current.
//
//     node scripts/api.mjs            writes it
//     node scripts/api.mjs --check    writes nothing; exits with 1 if it differs
//
// Every exported name with its declaration, its words and its members, as the compiler sees them. The reference page of
// this SDK and the table of both SDKs' names are made from it, and a change to what is public shows in its diff.
import { readFileSync, writeFileSync } from "node:fs";
import { basename } from "node:path";
import { fileURLToPath } from "node:url";

import ts from "typescript";

const ENTRIES = ["src/index.ts", "src/tokenization.ts", "src/tools.ts"];
const here = fileURLToPath(new URL("../", import.meta.url));
const held = `${here}api.json`;

const { config } = ts.readConfigFile(`${here}tsconfig.json`, ts.sys.readFile);
const { options } = ts.parseJsonConfigFileContent(config, ts.sys, here);
const program = ts.createProgram(
  ENTRIES.map((entry) => here + entry),
  options,
);
const checker = program.getTypeChecker();

const found = `[\n${ENTRIES.flatMap(namesOf).map(linesOf).join(",\n")}\n]\n`;
if (!process.argv.includes("--check")) {
  writeFileSync(held, found);
} else if (readFileSync(held, "utf8") !== found) {
  console.error("api.json is not what the sources say; run: npm run api");
  process.exitCode = 1;
}

/** An entry as JSON, with a line for itself and one for each of its members. */
function linesOf({ members, ...itself }) {
  const own = JSON.stringify(itself).slice(0, -1);
  return `${own},"members":[${members.map((member) => `\n${JSON.stringify(member)}`).join(",")}]}`;
}

/** The exported names of an entry, in the order of their modules and lines. */
function namesOf(entry) {
  const source = program.getSourceFile(here + entry);
  if (source === undefined) throw new Error(`${entry} is not there`);
  const module = checker.getSymbolAtLocation(source);
  return checker
    .getExportsOfModule(module)
    .map((symbol) => (symbol.flags & ts.SymbolFlags.Alias ? checker.getAliasedSymbol(symbol) : symbol))
    .map((symbol) => ({ symbol, declaration: symbol.declarations[0] }))
    .sort((one, other) => place(one.declaration).localeCompare(place(other.declaration)))
    .map(({ symbol, declaration }) => ({
      name: symbol.name,
      entry: basename(entry, ".ts"),
      room: basename(declaration.getSourceFile().fileName, ".ts"),
      declaration: declarationOf(symbol, declaration),
      says: wordsOf(symbol),
      members: membersOf(symbol, declaration),
    }));
}

function place(declaration) {
  return `${declaration.getSourceFile().fileName}:${String(declaration.getStart()).padStart(9, "0")}`;
}

function declarationOf(symbol, declaration) {
  if (ts.isFunctionDeclaration(declaration)) return `function ${symbol.name}${callOf(declaration)}`;
  if (ts.isTypeAliasDeclaration(declaration)) return textOf(declaration).replace(/^export /, "");
  const heritage = (declaration.heritageClauses ?? []).map((clause) => ` ${textOf(clause)}`).join("");
  return `${ts.isClassDeclaration(declaration) ? "class" : "interface"} ${symbol.name}${heritage}`;
}

/** Public members: a class's own, an interface's with those it extends, the texts of a union of texts. */
function membersOf(symbol, declaration) {
  if (ts.isFunctionDeclaration(declaration)) return [];
  const type = checker.getDeclaredTypeOfSymbol(symbol);
  if (ts.isTypeAliasDeclaration(declaration)) {
    const texts = type.isUnion() && type.types.every((one) => one.isStringLiteral()) ? type.types : [];
    return texts.map((one) => ({ name: one.value, signature: "", says: "" }));
  }
  if (ts.isInterfaceDeclaration(declaration)) return type.getProperties().filter(isOurs).map(memberOf);
  const own = declaration.members.map((member) => member.symbol).filter((member) => member !== undefined);
  return [...new Set(own)].filter(isOurs).flatMap((member) => memberOf(member, type) ?? []);
}

function isOurs(member) {
  const declaration = member.declarations?.[0];
  return (
    declaration !== undefined && declaration.getSourceFile().fileName.startsWith(`${here}src/`) && isPublic(declaration)
  );
}

function isPublic(declaration) {
  const hidden = ts.ModifierFlags.Private | ts.ModifierFlags.Protected;
  return (
    (ts.getCombinedModifierFlags(declaration) & hidden) === 0 &&
    !(declaration.name !== undefined && ts.isPrivateIdentifier(declaration.name)) &&
    !ts.getJSDocTags(declaration).some((tag) => tag.tagName.text === "internal")
  );
}

function memberOf(member, owner) {
  const declaration = member.declarations[0];
  const says = wordsOf(member);
  if (ts.isConstructorDeclaration(declaration)) {
    // Errors are thrown, not made.
    const isError = checker.getPropertyOfType(owner, "stack") !== undefined;
    return isError ? undefined : { name: "constructor", signature: callOf(declaration), says };
  }
  const name = textOf(declaration.name);
  if (ts.isMethodDeclaration(declaration) || ts.isMethodSignature(declaration)) {
    return { name, signature: callOf(declaration), says };
  }
  const flags = ts.TypeFormatFlags.NoTruncation | ts.TypeFormatFlags.UseAliasDefinedOutsideCurrentScope;
  const type = checker.typeToString(checker.getTypeOfSymbol(member), declaration, flags);
  return { name, signature: `${declaration.questionToken === undefined ? "" : "?"}: ${type}`, says };
}

/** What follows the name: parameters and what comes back. */
function callOf(declaration) {
  const parameters = declaration.parameters.map(textOf).join(", ");
  const result = declaration.type === undefined ? "" : `: ${textOf(declaration.type)}`;
  return `(${parameters})${result}`;
}

function wordsOf(symbol) {
  return ts.displayPartsToString(symbol.getDocumentationComment(checker));
}

function textOf(node) {
  return node.getText().replace(/\s+/g, " ");
}
